"""SmolLM3: Llama without rope on every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_LAYERS, MAX_POSITIONS
from workers.models.config_json.rope_section import with_rope
from workers.models.config_json.sliding_windows import has_window_by_layer

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["SMOLLM3"]

_THETA = 2e6


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(
        file, SMOLLM3.architecture, default_num_kv_heads=4, is_tied_by_default=True
    )
    has_attention_bias = file.flag("attention_bias", False)
    rotated = _rotated_layers(file, config.num_layers)
    return replace(
        with_rope(config, file, default_theta=_THETA),
        rotated_layers=rotated,
        sliding_windows=_windows(file, rotated),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=file.flag("mlp_bias", False),
    )


def _rotated_layers(file: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has rope; 1 in `no_rope_layers` says that it has."""
    interval = file.integer("no_rope_layer_interval", 4, most=MAX_LAYERS)
    if "no_rope_layers" not in file:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    values = file.value("no_rope_layers")
    if not isinstance(values, list) or len(values) != num_layers or not set(values) <= {0, 1}:
        raise file.rejection("no_rope_layers", f"must be a list of {num_layers} numbers, 0 or 1")
    return tuple(bool(value) for value in values)


def _windows(file: ConfigFile, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the windows, which by default layers without rope have."""
    file.note_read("sliding_window", "max_window_layers")
    has_window = has_window_by_layer(file, len(rotated))
    if any(has_window) and not file.flag("use_sliding_window", False):
        # Transformers masks by the window or not, depending on its implementation of attention.
        raise file.rejection(
            "layer_types", "may contain only full_attention unless use_sliding_window is true"
        )
    if not file.flag("use_sliding_window", False) or "sliding_window" not in file:
        return ()
    window = file.integer("sliding_window", most=MAX_POSITIONS)
    return tuple(window if has else None for has in has_window or [not one for one in rotated])


SMOLLM3 = Family(architecture="SmolLM3ForCausalLM", model_types=("smollm3",), read=_read)
