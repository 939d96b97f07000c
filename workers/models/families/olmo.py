"""Families of OLMo."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, TensorNames
from workers.models.config_json.family import (
    STACKED_NAMES,
    Family,
    base_config,
    experts_of,
    windows_by_layer_type,
)
from workers.models.config_json.rope_section import longest_context, ropes_by_layer_type, with_rope

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["OLMO2", "OLMO3", "OLMOE"]

_NAMES_OLMO2 = TensorNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_THETA_OLMO3 = 5e5


def olmo_config(file: ConfigFile) -> ModelConfig:
    """Return the common configuration of OLMo-2 and OLMo-3, without rope and windows."""
    has_bias = file.flag("attention_bias", False)
    return replace(
        base_config(file, default_norm_eps=1e-5),
        names=_NAMES_OLMO2,
        has_qk_norm=True,
        is_qk_norm_whole=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )


def _read_olmo2(file: ConfigFile) -> ModelConfig:
    """OLMo-2: norms after attention and MLP only, and QK norm over all heads."""
    return with_rope(olmo_config(file), file)


OLMO2 = Family(architecture="Olmo2ForCausalLM", model_types=("olmo2",), reader=_read_olmo2)


def _read_olmo3(file: ConfigFile) -> ModelConfig:
    """OLMo-3: OLMo-2 with windows on three of four layers, and rope scaling on the others."""
    config = olmo_config(file)
    # Transformers 5 would apply another value to layers without a window only.
    file.reject_unless("rope_theta", _THETA_OLMO3)
    rope, window_rope = ropes_by_layer_type(file, theta=_THETA_OLMO3, window_theta=_THETA_OLMO3)
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


OLMO3 = Family(architecture="Olmo3ForCausalLM", model_types=("olmo3",), reader=_read_olmo3)


def _read_olmoe(file: ConfigFile) -> ModelConfig:
    """OLMoE: experts on all layers, and QK norm over all heads."""
    has_bias = file.flag("attention_bias", False)
    # Values after the norms are not clamped.
    file.reject_unless("clip_qkv", None)
    config = base_config(file, default_norm_eps=1e-5)
    return replace(
        with_rope(config, file),
        stacked_names=STACKED_NAMES,
        has_qk_norm=True,
        is_qk_norm_whole=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        experts=experts_of(
            file,
            default_num=64,
            default_num_chosen=8,
            intermediate_size=config.intermediate_size,
            is_renormalized=file.flag("norm_topk_prob", False),
        ),
    )


OLMOE = Family(architecture="OlmoeForCausalLM", model_types=("olmoe",), reader=_read_olmoe)
