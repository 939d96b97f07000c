"""OLMoE: experts on all layers, and QK norm over all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.experts import STACKED_NAMES, experts_of
from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["OLMOE"]


def _read(file: ConfigFile) -> ModelConfig:
    has_bias = file.flag("attention_bias", False)
    # Values after the norms are not clamped.
    file.reject_unless("clip_qkv", None)
    config = base_config(file, OLMOE.architecture, default_norm_eps=1e-5)
    return replace(
        with_rope(config, file),
        stacked_names=STACKED_NAMES,
        has_qk_norm=True,
        is_qk_norm_whole=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        experts=experts_of(
            file,
            default_num=64,
            default_num_chosen=8,
            intermediate_size=config.intermediate_size,
            is_renormalized=file.flag("norm_topk_prob", False),
        ),
    )


OLMOE = Family(architecture="OlmoeForCausalLM", model_types=("olmoe",), read=_read)
