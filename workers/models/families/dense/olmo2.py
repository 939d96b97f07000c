"""OLMo-2: norms after attention and MLP only, and QK norm over all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["OLMO2", "olmo_config"]

_NAMES = TensorNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


def olmo_config(file: ConfigFile, architecture: str) -> ModelConfig:
    """Return the common configuration of OLMo-2 and OLMo-3, without rope and windows."""
    has_bias = file.flag("attention_bias", False)
    return replace(
        base_config(file, architecture, default_norm_eps=1e-5),
        names=_NAMES,
        has_qk_norm=True,
        is_qk_norm_whole=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )


def _read(file: ConfigFile) -> ModelConfig:
    return with_rope(olmo_config(file, OLMO2.architecture), file)


OLMO2 = Family(architecture="Olmo2ForCausalLM", model_types=("olmo2",), read=_read)
