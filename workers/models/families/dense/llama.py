"""Llama; `attention_bias` adds biases to all four projections, `mlp_bias` to the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["LLAMA"]


def _read(file: ConfigFile) -> ModelConfig:
    has_attention_bias = file.flag("attention_bias", False)
    # Falcon3 also names the activation and the gate of its MLP together.
    file.choice("activation", ("swiglu", "silu"), "swiglu")
    return replace(
        with_rope(base_config(file, LLAMA.architecture), file),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=file.flag("mlp_bias", False),
    )


LLAMA = Family(architecture="LlamaForCausalLM", model_types=("llama",), read=_read)
