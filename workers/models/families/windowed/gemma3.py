"""Gemma-3 for text: QK norm, no soft caps, a second rope for layers with sliding windows.

EmbeddingGemma has no head, and its tokens attend to tokens before and after them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family
from workers.models.config_json.limits import MAX_LAYERS, MAX_THETA
from workers.models.config_json.rope_section import ropes_by_layer_type
from workers.models.config_json.sliding_windows import windows_by_layer_type
from workers.models.families.windowed.gemma2 import gemma_config

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GEMMA3", "read_gemma3"]

_HEADLESS = "Gemma3TextModel"


def read_gemma3(file: ConfigFile) -> ModelConfig:
    """Return the configuration of a Gemma-3, or of its text part."""
    config = gemma_config(file, GEMMA3.architecture, default_logit_cap=None)
    # Transformers reads this soft cap, but does not apply it.
    file.reject_unless("attn_logit_softcapping", None)
    rope, window_rope = ropes_by_layer_type(
        file,
        theta=file.number("rope_theta", 1e6, most=MAX_THETA),
        window_theta=file.number("rope_local_base_freq", 1e4, most=MAX_THETA),
    )
    is_bidirectional = _is_bidirectional(file)
    pattern = file.integer("sliding_window_pattern", 6, most=MAX_LAYERS)
    all_but_each_last = [(layer + 1) % pattern != 0 for layer in range(config.num_layers)]
    windows = windows_by_layer_type(
        file, default_window=4096, has_window_by_default=all_but_each_last
    )
    if is_bidirectional:
        # The window is that of both sides together.
        windows = tuple(None if window is None else window // 2 + 1 for window in windows)
    return replace(
        config,
        rope=rope,
        window_rope=window_rope,
        has_qk_norm=True,
        sliding_windows=windows,
        is_bidirectional=is_bidirectional,
    )


def _is_bidirectional(file: ConfigFile) -> bool:
    """Return whether tokens attend to later tokens, which is only allowed without a head."""
    if _HEADLESS not in file.words("architectures"):
        file.reject_unless("use_bidirectional_attention", False)
    return file.flag("use_bidirectional_attention", False)


GEMMA3 = Family(architecture="Gemma3ForCausalLM", model_types=("gemma3_text",), read=read_gemma3)
