"""OLMo-3: OLMo-2 with sliding windows on three of four layers, and rope scaling on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family
from workers.models.config_json.rope_section import longest_context, ropes_by_layer_type
from workers.models.config_json.sliding_windows import windows_by_layer_type
from workers.models.families.dense.olmo2 import olmo_config

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["OLMO3"]

_THETA = 5e5


def _read(file: ConfigFile) -> ModelConfig:
    config = olmo_config(file, OLMO3.architecture)
    # Transformers 5 would apply another value to layers without a window only.
    file.reject_unless("rope_theta", _THETA)
    rope, window_rope = ropes_by_layer_type(file, theta=_THETA, window_theta=_THETA)
    all_but_each_fourth = [(layer + 1) % 4 != 0 for layer in range(config.num_layers)]
    return replace(
        config,
        rope=rope,
        window_rope=window_rope,
        max_positions=longest_context(config, rope),
        sliding_windows=windows_by_layer_type(
            file, default_window=4096, has_window_by_default=all_but_each_fourth
        ),
    )


OLMO3 = Family(architecture="Olmo3ForCausalLM", model_types=("olmo3",), read=_read)
