"""Reads from `config.json` which layers have a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.models.config_json.limits import MAX_LAYERS, MAX_POSITIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.models.config_json.config_file import ConfigFile

__all__ = ["has_window_by_layer", "qwen_windows", "windows_by_layer_type"]

_KINDS = ("sliding_attention", "full_attention")


def windows_by_layer_type(
    file: ConfigFile, *, default_window: int, has_window_by_default: Sequence[bool]
) -> tuple[int | None, ...]:
    """Return each layer's window by `layer_types`, or by the default if that is missing."""
    has_window = has_window_by_layer(file, len(has_window_by_default)) or has_window_by_default
    if file.has_null("sliding_window") and any(has_window):
        raise file.rejection(
            "sliding_window", "must be an integer, since some layers use sliding attention"
        )
    window = file.integer("sliding_window", default_window, most=MAX_POSITIONS)
    return tuple(window if has else None for has in has_window)


def qwen_windows(
    file: ConfigFile, num_layers: int, *, default_first: int = 28
) -> tuple[int | None, ...]:
    """Return Qwen's windows, which `use_sliding_window` enables; empty without windows.

    `default_first` is the default of the first layer with a window.
    """
    file.note_read("sliding_window", "max_window_layers", "layer_types")
    if not file.flag("use_sliding_window", False):
        return ()
    if file.has_null("sliding_window"):
        return ()
    window = file.integer("sliding_window", 4096, most=MAX_POSITIONS)
    first = file.integer("max_window_layers", default_first, least=0, most=MAX_LAYERS)
    later = [layer >= first for layer in range(num_layers)]
    return tuple(window if has else None for has in has_window_by_layer(file, num_layers) or later)


def has_window_by_layer(file: ConfigFile, num_layers: int) -> list[bool]:
    """Return whether each layer has a window; empty if `layer_types` is missing."""
    kinds = file.words("layer_types")
    if kinds and len(kinds) != num_layers:
        raise file.rejection("layer_types", f"must have {num_layers} entries, not {len(kinds)}")
    for kind in kinds:
        if kind not in _KINDS:
            raise file.rejection(
                "layer_types", f"may contain only {' and '.join(_KINDS)}, not {kind[:40]!r}"
            )
    return [kind == "sliding_attention" for kind in kinds]
