"""Ministral: Mistral with sliding windows on some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope
from workers.models.config_json.sliding_windows import windows_by_layer_type

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["MINISTRAL"]


def _read(file: ConfigFile) -> ModelConfig:
    config = with_rope(base_config(file, MINISTRAL.architecture, default_num_kv_heads=8), file)
    has_window = not file.has_null("sliding_window")
    return replace(
        config,
        sliding_windows=windows_by_layer_type(
            file, default_window=4096, has_window_by_default=[has_window] * config.num_layers
        ),
    )


MINISTRAL = Family(architecture="MinistralForCausalLM", model_types=("ministral",), read=_read)
