"""Ernie 4.5 (dense): Llama with rope of adjacent pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["ERNIE4_5"]

_THETA = 5e5


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(
        file,
        ERNIE4_5.architecture,
        default_num_kv_heads=2,
        default_head_size=128,
        default_norm_eps=1e-5,
        is_tied_by_default=True,
    )
    config = with_rope(config, file, default_theta=_THETA)
    file.reject_unless("compression_ratio", 1)
    has_bias = file.flag("use_bias", False)
    assert config.rope is not None
    return replace(
        config,
        rope=replace(config.rope, is_interleaved=True),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
    )


ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    model_types=("ernie4_5",),
    read=_read,
    aliases=("Ernie4_5_ForCausalLM",),
)
