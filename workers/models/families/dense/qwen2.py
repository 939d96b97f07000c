"""Qwen2: biases on queries, keys and values; optional sliding windows on later layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope
from workers.models.config_json.sliding_windows import qwen_windows

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["QWEN2"]


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(file, QWEN2.architecture, default_num_kv_heads=32)
    return replace(
        with_rope(config, file),
        has_qkv_bias=True,
        sliding_windows=qwen_windows(file, config.num_layers),
    )


QWEN2 = Family(architecture="Qwen2ForCausalLM", model_types=("qwen2",), read=_read)
