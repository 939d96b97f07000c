"""MPT: ALiBi, no biases, and one fused tensor of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.alibi import DEFAULT_BIAS_MAX, alibi_config
from workers.models.config_json.family import Family
from workers.models.config_json.limits import MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["MPT"]

_MAX_LIMIT = 1e6
_NORM_WORDS = ("low_precision_layernorm", "layernorm")
_NAMES = TensorNames(
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


def _read(file: ConfigFile) -> ModelConfig:
    attention = file.section("attn_config")
    _check(file, attention)
    heads_key = file.first_of("num_attention_heads", "n_heads")
    config = alibi_config(
        file,
        MPT.architecture,
        names=_NAMES,
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
        attention_scale=attention.number_or_null("softmax_scale", None, most=_MAX_LIMIT),
        qkv_limit=_qkv_limit(attention),
    )


def _check(file: ConfigFile, attention: ConfigFile) -> None:
    """Raise CheckpointError for options that transformers ignores or does not support."""
    file.choice("norm_type", _NORM_WORDS, _NORM_WORDS[0])
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


def _qkv_limit(attention: ConfigFile) -> float | None:
    # 0 means no limit, too.
    if attention.value("clip_qkv") == 0:
        return None
    return attention.number_or_null("clip_qkv", None, most=_MAX_LIMIT)


MPT = Family(
    architecture="MptForCausalLM",
    model_types=("mpt",),
    read=_read,
    aliases=("MPTForCausalLM",),
)
