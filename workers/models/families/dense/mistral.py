"""Mistral: Llama with one sliding window for all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_POSITIONS
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["MISTRAL", "read_mistral"]


def read_mistral(file: ConfigFile) -> ModelConfig:
    """Return the configuration of a Mistral, or of its text part."""
    config = with_rope(base_config(file, MISTRAL.architecture, default_num_kv_heads=8), file)
    if file.has_null("sliding_window"):
        return config
    window = file.integer("sliding_window", 4096, most=MAX_POSITIONS)
    return replace(config, sliding_windows=(window,) * config.num_layers)


MISTRAL = Family(architecture="MistralForCausalLM", model_types=("mistral",), read=read_mistral)
