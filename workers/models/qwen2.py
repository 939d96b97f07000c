"""Qwen2: biases on queries, keys and values; optional sliding windows on later layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.family import Family, base_config
from workers.models.rope_section import read_rope
from workers.models.sliding_windows import qwen_windows

if TYPE_CHECKING:
    from pagedray.config import ModelConfig
    from workers.models.config_file import ConfigFile

__all__ = ["QWEN2"]


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(file, QWEN2.architecture, default_num_kv_heads=32)
    return replace(
        config,
        rope=read_rope(file),
        has_qkv_bias=True,
        sliding_windows=qwen_windows(file, config.num_layers),
    )


QWEN2 = Family(architecture="Qwen2ForCausalLM", read=_read)
