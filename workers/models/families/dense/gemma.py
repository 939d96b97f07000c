"""Gemma: Llama with scaled embeddings, norms times one plus their weight, and GELU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GEMMA"]


def _read(file: ConfigFile) -> ModelConfig:
    # Older checkpoints say gelu and mean its approximation, as transformers knows.
    legacy = file.value("hidden_act") == "gelu"
    file.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    config = base_config(
        file,
        GEMMA.architecture,
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


GEMMA = Family(architecture="GemmaForCausalLM", model_types=("gemma",), read=_read)
