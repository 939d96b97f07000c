"""Gemma-3 for text: QK norm, no soft caps, a second rope for layers with sliding windows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import MAX_LAYERS, Family
from workers.models.config_json.rope_section import MAX_THETA, rope_of
from workers.models.config_json.sliding_windows import windows_by_layer_type
from workers.models.families.gemma2 import gemma_config

if TYPE_CHECKING:
    from pagedray.config import ModelConfig, RopeConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GEMMA3"]


def _read(file: ConfigFile) -> ModelConfig:
    config = gemma_config(file, GEMMA3.architecture, default_logit_cap=None)
    # Transformers reads this soft cap, but does not apply it.
    file.refuse_unless("attn_logit_softcapping", None)
    rope, window_rope = _ropes(file)
    pattern = file.integer("sliding_window_pattern", 6, most=MAX_LAYERS)
    all_but_each_last = [(layer + 1) % pattern != 0 for layer in range(config.num_layers)]
    return replace(
        config,
        rope=rope,
        window_rope=window_rope,
        has_qk_norm=True,
        sliding_windows=windows_by_layer_type(
            file, default_window=4096, has_window_by_default=all_but_each_last
        ),
    )


def _ropes(file: ConfigFile) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of layers without and with a sliding window."""
    theta = file.number("rope_theta", 1e6, most=MAX_THETA)
    window_theta = file.number("rope_local_base_freq", 1e4, most=MAX_THETA)
    # Transformers 4 scales the layers without a window only.
    by_kind = file.section("rope_parameters")
    full_key, window_key = "full_attention", "sliding_attention"
    full, window = by_kind.section(full_key), by_kind.section(window_key)
    if "rope_parameters" not in file:
        full = file.section("rope_scaling")
    elif "rope_scaling" in file:
        raise file.refusal("rope_scaling", "is not allowed together with rope_parameters")
    for key in by_kind.given_keys():
        if key not in (full_key, window_key):
            raise by_kind.refusal(key, f"is not allowed; use {full_key} and {window_key}")
    for section in (full, window):
        section.refuse_unless("partial_rotary_factor", 1)
    return (
        rope_of(full, file, default_theta=theta),
        rope_of(window, file, default_theta=window_theta),
    )


GEMMA3 = Family(architecture="Gemma3ForCausalLM", model_types=("gemma3_text",), read=_read)
