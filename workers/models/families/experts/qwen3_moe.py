"""Qwen3-MoE: Qwen3 with experts, on all layers or on some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.experts import STACKED_NAMES, experts_of
from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ExpertsConfig, ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["QWEN3_MOE"]


def _read(file: ConfigFile) -> ModelConfig:
    has_attention_bias = file.flag("attention_bias", False)
    file.reject_unless("use_qk_norm", True)
    config = base_config(file, QWEN3_MOE.architecture, default_num_kv_heads=4)
    return replace(
        with_rope(config, file),
        stacked_names=STACKED_NAMES,
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        sliding_windows=_windows(file, config.num_layers),
        experts=_experts(file, config.num_layers),
    )


def _experts(file: ConfigFile, num_layers: int) -> ExpertsConfig:
    experts = experts_of(
        file,
        default_num=128,
        default_num_chosen=8,
        intermediate_size=file.integer("moe_intermediate_size", 768, most=MAX_SIZE),
        is_renormalized=file.flag("norm_topk_prob", False),
    )
    step = file.integer("decoder_sparse_step", 1, most=MAX_LAYERS)
    dense = file.indices("mlp_only_layers", most=MAX_LAYERS)
    layers = range(num_layers)
    return replace(
        experts,
        dense_layers=tuple(index for index in layers if index in dense or (index + 1) % step),
    )


def _windows(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Return the window that `use_sliding_window` gives to all layers, unlike that of Qwen3."""
    file.note_read("sliding_window", "max_window_layers")
    if not file.flag("use_sliding_window", False) or file.has_null("sliding_window"):
        return ()
    return (file.integer("sliding_window", 4096, most=MAX_POSITIONS),) * num_layers


QWEN3_MOE = Family(architecture="Qwen3MoeForCausalLM", model_types=("qwen3_moe",), read=_read)
