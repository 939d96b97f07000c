"""Mistral: Llama with one sliding window for all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.family import MAX_POSITIONS, Family, base_config
from workers.models.rope_section import read_rope

if TYPE_CHECKING:
    from pagedray.config import ModelConfig
    from workers.models.config_file import ConfigFile

__all__ = ["MISTRAL"]


def _read(file: ConfigFile) -> ModelConfig:
    config = replace(
        base_config(file, MISTRAL.architecture, default_num_kv_heads=8), rope=read_rope(file)
    )
    if file.has_null("sliding_window"):
        return config
    window = file.integer("sliding_window", 4096, most=MAX_POSITIONS)
    return replace(config, sliding_windows=(window,) * config.num_layers)


MISTRAL = Family(architecture="MistralForCausalLM", read=_read)
