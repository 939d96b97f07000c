"""Gemma-2: norms around attention and MLP, soft caps, sliding windows on every other layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope
from workers.models.config_json.sliding_windows import windows_by_layer_type

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GEMMA2", "gemma_config"]

_MAX_CAP = 1e6
_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def gemma_config(
    file: ConfigFile, architecture: str, *, default_logit_cap: float | None
) -> ModelConfig:
    """Return the common configuration of Gemma-2 and Gemma-3, without rope and windows."""
    config = base_config(
        file,
        architecture,
        activation="gelu_tanh",
        default_num_kv_heads=4,
        default_head_size=256,
        is_tied_by_default=True,
    )
    # A second spelling, which transformers ignores.
    file.note_read("sliding_window_size")
    has_bias = file.flag("attention_bias", False)
    return replace(
        config,
        names=_NAMES,
        norm_kind="offset_rms",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=file.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_soft_cap=file.number_or_null(
            "final_logit_softcapping", default_logit_cap, most=_MAX_CAP
        ),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )


def _read(file: ConfigFile) -> ModelConfig:
    config = gemma_config(file, GEMMA2.architecture, default_logit_cap=30.0)
    file.reject_unless("use_bidirectional_attention", False)
    every_other = [layer % 2 == 0 for layer in range(config.num_layers)]
    return replace(
        with_rope(config, file),
        attention_soft_cap=file.number_or_null("attn_logit_softcapping", 50.0, most=_MAX_CAP),
        sliding_windows=windows_by_layer_type(
            file, default_window=4096, has_window_by_default=every_other
        ),
    )


GEMMA2 = Family(architecture="Gemma2ForCausalLM", model_types=("gemma2",), read=_read)
