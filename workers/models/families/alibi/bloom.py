"""BLOOM: ALiBi, biases, a norm after the embedding, queries, keys and values fused by head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.alibi import alibi_config
from workers.models.config_json.family import Family
from workers.models.config_json.limits import MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["BLOOM"]

_NAMES = TensorNames(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    decoder_layer="transformer.h.{}",
    final_norm="transformer.ln_f",
    qkv=("self_attention.query_key_value",),
    is_qkv_by_head=True,
    attention_output="self_attention.dense",
    mlp_input=("mlp.dense_h_to_4h",),
    mlp_output="mlp.dense_4h_to_h",
)


def _read(file: ConfigFile) -> ModelConfig:
    file.reject_unless("apply_residual_connection_post_layernorm", False)
    heads_key = file.first_of("num_attention_heads", "n_head")
    config = alibi_config(
        file,
        BLOOM.architecture,
        names=_NAMES,
        hidden_size=file.integer(file.first_of("n_embed", "hidden_size"), most=MAX_SIZE),
        num_layers=file.integer(file.first_of("num_hidden_layers", "n_layer"), most=MAX_LAYERS),
        num_heads=file.integer(heads_key, most=MAX_HEADS),
        heads_key=heads_key,
        # ALiBi sets no limit; this is the context length of training.
        max_positions=file.integer("seq_length", 2048, most=MAX_POSITIONS),
        activation="gelu_tanh",
    )
    return replace(
        config,
        has_norm_bias=True,
        has_qkv_bias=True,
        has_output_bias=True,
        has_mlp_bias=True,
    )


BLOOM = Family(architecture="BloomForCausalLM", model_types=("bloom",), read=_read)
