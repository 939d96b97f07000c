"""Cohere-2 (Command R7B, Command A): parallel attention and MLP, rope on layers with windows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_LAYERS
from workers.models.config_json.rope_section import with_rope
from workers.models.config_json.sliding_windows import windows_by_layer_type

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["COHERE2"]

_MAX_SCALE = 1e6
_NAMES = TensorNames(mlp_norm=None)
# Options that published checkpoints name, of which transformers has only these values.
_FIXED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(
        file,
        COHERE2.architecture,
        norm_eps_key="layer_norm_eps",
        default_norm_eps=1e-5,
        is_tied_by_default=True,
    )
    config = with_rope(config, file)
    for key, value in _FIXED.items():
        file.reject_unless(key, value)
    # The period of the older spelling; that of `layer_types` wins.
    pattern = file.integer("sliding_window_pattern", 4, most=MAX_LAYERS)
    windows = windows_by_layer_type(
        file,
        default_window=4096,
        has_window_by_default=[(layer + 1) % pattern != 0 for layer in range(config.num_layers)],
    )
    has_bias = file.flag("attention_bias", False)
    assert config.rope is not None
    return replace(
        config,
        names=_NAMES,
        norm_kind="layer",
        rope=replace(config.rope, is_interleaved=True),
        rotated_layers=tuple(window is not None for window in windows),
        sliding_windows=windows,
        has_parallel_mlp=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        logit_scale=file.number("logit_scale", 0.0625, most=_MAX_SCALE),
    )


COHERE2 = Family(architecture="Cohere2ForCausalLM", model_types=("cohere2",), read=_read)
