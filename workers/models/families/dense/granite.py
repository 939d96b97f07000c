"""Granite: Llama with numbers that multiply embeddings, scores, outputs of layers and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_FACTOR
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GRANITE", "granite_config"]


def granite_config(file: ConfigFile, architecture: str) -> ModelConfig:
    """Return the common configuration of all Granites."""

    def factor(key: str) -> float:
        return file.number(key, 1.0, most=MAX_FACTOR)

    has_attention_bias = file.flag("attention_bias", False)
    return replace(
        with_rope(base_config(file, architecture), file),
        embedding_scale=factor("embedding_multiplier"),
        attention_scale=factor("attention_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logit_scale=1.0 / factor("logits_scaling"),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
    )


def _read(file: ConfigFile) -> ModelConfig:
    config = granite_config(file, GRANITE.architecture)
    return replace(config, has_mlp_bias=file.flag("mlp_bias", False))


GRANITE = Family(architecture="GraniteForCausalLM", model_types=("granite",), read=_read)
