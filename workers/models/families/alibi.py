"""Families with ALiBi: BLOOM and MPT."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import Activation, ModelConfig, TensorNames
from workers.models.config_json.family import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SIZE,
    MAX_VOCAB,
    Family,
    check_causal,
    eos_token_ids,
)

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["BLOOM", "MPT", "alibi_slopes"]

_NAMES_BLOOM = TensorNames(
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
_MAX_LIMIT_MPT = 1e6
_NORM_WORDS_MPT = ("low_precision_layernorm", "layernorm")
_NAMES_MPT = TensorNames(
    embedding="transformer.wte",
    decoder_layer="transformer.blocks.{}",
    final_norm="transformer.norm_f",
    attention_norm="norm_1",
    qkv=("attn.Wqkv",),
    attention_output="attn.out_proj",
    mlp_norm="norm_2",
    mlp_input=("ffn.up_proj",),
    mlp_output="ffn.down_proj",
)

DEFAULT_BIAS_MAX = 8.0


def _read_bloom(file: ConfigFile) -> ModelConfig:
    """BLOOM: ALiBi, biases, a norm after the embedding, queries, keys and values fused by head."""
    file.reject_unless("apply_residual_connection_post_layernorm", False)
    heads_key = file.first_of("num_attention_heads", "n_head")
    config = alibi_config(
        file,
        names=_NAMES_BLOOM,
        hidden_size=file.integer(file.first_of("n_embed", "hidden_size"), most=MAX_SIZE),
        num_layers=file.integer(file.first_of("num_hidden_layers", "n_layer"), most=MAX_LAYERS),
        num_heads=file.integer(heads_key, most=MAX_HEADS),
        heads_key=heads_key,
        # ALiBi sets no limit; this is the context length of training.
        max_positions=file.integer("seq_length", 2048, most=MAX_POSITIONS),
        activation="gelu_tanh",
    )
    return replace(
        config, has_norm_bias=True, has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True
    )


BLOOM = Family(architecture="BloomForCausalLM", model_types=("bloom",), reader=_read_bloom)


def _read_mpt(file: ConfigFile) -> ModelConfig:
    """MPT: ALiBi, no biases, and one fused tensor of queries, keys and values."""
    attention = file.section("attn_config")
    _check_mpt(file, attention)
    heads_key = file.first_of("num_attention_heads", "n_heads")
    config = alibi_config(
        file,
        names=_NAMES_MPT,
        hidden_size=file.integer(file.first_of("hidden_size", "d_model"), most=MAX_SIZE),
        num_layers=file.integer(file.first_of("num_hidden_layers", "n_layers"), most=MAX_LAYERS),
        num_heads=file.integer(heads_key, most=MAX_HEADS),
        heads_key=heads_key,
        max_positions=file.integer("max_seq_len", 2048, most=MAX_POSITIONS),
        activation="gelu",
        bias_max=attention.number("alibi_bias_max", DEFAULT_BIAS_MAX, most=1e3),
    )
    return replace(
        config,
        attention_scale=attention.number_or_null("softmax_scale", None, most=_MAX_LIMIT_MPT),
        qkv_limit=_qkv_limit_mpt(attention),
    )


def _check_mpt(file: ConfigFile, attention: ConfigFile) -> None:
    """Raise CheckpointError for options that transformers ignores or does not support."""
    file.choice("norm_type", _NORM_WORDS_MPT, _NORM_WORDS_MPT[0])
    file.reject_unless("no_bias", True)
    file.reject_unless("expansion_ratio", 4)
    file.reject_unless("logit_scale", None)
    file.reject_unless("embedding_fraction", 1)
    # ALiBi replaces learned positions.
    file.note_read("learned_pos_emb")
    # Fields that transformers writes into each section.
    attention.note_read("model_type", "dtype", "torch_dtype", "architectures")
    attention.reject_unless("attn_type", "multihead_attention")
    attention.reject_unless("alibi", True)
    attention.reject_unless("prefix_lm", False)
    attention.reject_unless("qk_ln", False)
    attention.reject_unless("attn_uses_sequence_id", False)


def _qkv_limit_mpt(attention: ConfigFile) -> float | None:
    # 0 means no limit, too.
    if attention.value("clip_qkv") == 0:
        return None
    return attention.number_or_null("clip_qkv", None, most=_MAX_LIMIT_MPT)


MPT = Family(
    architecture="MptForCausalLM",
    model_types=("mpt",),
    reader=_read_mpt,
    aliases=("MPTForCausalLM",),
)


def alibi_slopes(num_heads: int, bias_max: float = DEFAULT_BIAS_MAX) -> tuple[float, ...]:
    """Return the slope of each head: a geometric sequence that ends at `2 ** -bias_max`.

    If the number of heads is not a power of two, the sequence is that of the power below it, and
    the other heads take every second slope of the sequence of twice as many heads.
    """
    num_even = 1 << (num_heads.bit_length() - 1)
    even = [2.0 ** (-bias_max * i / num_even) for i in range(1, num_even + 1)]
    between = [2.0 ** (-bias_max * i / (2 * num_even)) for i in range(1, 2 * num_even, 2)]
    return tuple(even + between)[:num_heads]


def alibi_config(
    file: ConfigFile,
    *,
    names: TensorNames,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    heads_key: str,
    max_positions: int,
    activation: Activation,
    bias_max: float = DEFAULT_BIAS_MAX,
) -> ModelConfig:
    """Return a decoder with ALiBi, layer norms and an MLP four times as wide, without a gate."""
    check_causal(file)
    if hidden_size % num_heads:
        raise file.rejection(
            heads_key, f"must be a divisor of the hidden size {hidden_size}, not {num_heads}"
        )
    vocab_size = file.integer("vocab_size", most=MAX_VOCAB)
    return ModelConfig(
        name=file.path.resolve().parent.name,
        folder=file.path.parent,
        names=names,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        max_positions=max_positions,
        norm_kind="layer",
        norm_eps=file.number("layer_norm_epsilon", 1e-5, most=1.0),
        rope=None,
        alibi_slopes=alibi_slopes(num_heads, bias_max),
        activation=activation,
        is_mlp_gated=False,
        has_tied_embeddings=file.flag("tie_word_embeddings", True),
        eos_token_ids=eos_token_ids(file, vocab_size),
    )
