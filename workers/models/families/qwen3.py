"""Qwen3: QK norm, and a head size of its own; optional sliding windows on later layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope
from workers.models.config_json.sliding_windows import qwen_windows

if TYPE_CHECKING:
    from pagedray.config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["QWEN3"]


def _read(file: ConfigFile) -> ModelConfig:
    has_attention_bias = file.flag("attention_bias", False)
    config = base_config(file, QWEN3.architecture, default_num_kv_heads=32, default_head_size=128)
    return replace(
        with_rope(config, file),
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        sliding_windows=qwen_windows(file, config.num_layers),
    )


QWEN3 = Family(architecture="Qwen3ForCausalLM", model_types=("qwen3",), read=_read)
