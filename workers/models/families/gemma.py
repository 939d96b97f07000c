"""Families of Gemma."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, TensorNames
from workers.models.config_json.family import (
    MAX_LAYERS,
    MAX_THETA,
    Family,
    base_config,
    windows_by_layer_type,
)
from workers.models.config_json.rope_section import ropes_by_layer_type, with_rope
from workers.models.families.text_part import TEXT_SECTION, as_text_part, is_tied_by_default

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GEMMA", "GEMMA2", "GEMMA3", "GEMMA3_MULTIMODAL"]

_MAX_CAP_GEMMA2 = 1e6
_NAMES_GEMMA2 = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_HEADLESS_GEMMA3 = "Gemma3TextModel"

# Published files leave out values that equal these defaults of transformers.
_DEFAULTS_GEMMA3_MULTIMODAL = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}


def _read_gemma(file: ConfigFile) -> ModelConfig:
    # Older checkpoints say gelu and mean its approximation, as transformers knows.
    """Gemma: Llama with scaled embeddings, norms times one plus their weight, and GELU."""
    legacy = file.value("hidden_act") == "gelu"
    file.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    config = base_config(
        file,
        activation="gelu_tanh",
        activation_key="hidden_activation" if legacy else "hidden_act",
        default_num_kv_heads=16,
        default_head_size=256,
        is_tied_by_default=True,
    )
    file.reject_unless("use_bidirectional_attention", False)
    has_bias = file.flag("attention_bias", False)
    return replace(
        with_rope(config, file),
        norm_kind="offset_rms",
        embedding_scale=config.hidden_size**0.5,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )


GEMMA = Family(architecture="GemmaForCausalLM", model_types=("gemma",), reader=_read_gemma)


def gemma_config(file: ConfigFile, *, default_logit_cap: float | None) -> ModelConfig:
    """Return the common configuration of Gemma-2 and Gemma-3, without rope and windows."""
    config = base_config(
        file,
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
        names=_NAMES_GEMMA2,
        norm_kind="offset_rms",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=file.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_soft_cap=file.number_or_null(
            "final_logit_softcapping", default_logit_cap, most=_MAX_CAP_GEMMA2
        ),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )


def _read_gemma2(file: ConfigFile) -> ModelConfig:
    """Gemma-2: norms around attention and MLP, soft caps, sliding windows on every other layer."""
    config = gemma_config(file, default_logit_cap=30.0)
    file.reject_unless("use_bidirectional_attention", False)
    every_other = [layer % 2 == 0 for layer in range(config.num_layers)]
    return replace(
        with_rope(config, file),
        attention_soft_cap=file.number_or_null(
            "attn_logit_softcapping", 50.0, most=_MAX_CAP_GEMMA2
        ),
        sliding_windows=windows_by_layer_type(
            file, default_window=4096, has_window_by_default=every_other
        ),
    )


GEMMA2 = Family(architecture="Gemma2ForCausalLM", model_types=("gemma2",), reader=_read_gemma2)


def read_gemma3(file: ConfigFile) -> ModelConfig:
    """Return the configuration of a Gemma-3, or of its text part."""
    config = gemma_config(file, default_logit_cap=None)
    # Transformers reads this soft cap, but does not apply it.
    file.reject_unless("attn_logit_softcapping", None)
    rope, window_rope = ropes_by_layer_type(
        file,
        theta=file.number("rope_theta", 1e6, most=MAX_THETA),
        window_theta=file.number("rope_local_base_freq", 1e4, most=MAX_THETA),
    )
    is_bidirectional = _is_bidirectional_gemma3(file)
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


def _is_bidirectional_gemma3(file: ConfigFile) -> bool:
    """Return whether tokens attend to later tokens, which is only allowed without a head."""
    if _HEADLESS_GEMMA3 not in file.words("architectures"):
        file.reject_unless("use_bidirectional_attention", False)
    return file.flag("use_bidirectional_attention", False)


GEMMA3 = Family(architecture="Gemma3ForCausalLM", model_types=("gemma3_text",), reader=read_gemma3)


def _read_gemma3_multimodal(file: ConfigFile) -> ModelConfig:
    """The text of Gemma-3 from 4B on."""
    text = file.section(TEXT_SECTION, _DEFAULTS_GEMMA3_MULTIMODAL)
    # Transformers reads this soft cap, but applies it to models without vision only.
    text.reject_unless("final_logit_softcapping", None)
    return as_text_part(
        read_gemma3(text),
        file,
        text,
        is_tied=is_tied_by_default(file),
        model_types=("gemma3_text",),
    )


GEMMA3_MULTIMODAL = Family(
    architecture="Gemma3ForConditionalGeneration",
    model_types=("gemma3",),
    reader=_read_gemma3_multimodal,
)
