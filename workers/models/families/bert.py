"""Reads BERT (Devlin et al. 2018) and RoBERTa (Liu et al. 2019) from `config.json`.

XLM-RoBERTa (Conneau et al. 2020) is a RoBERTa of many languages. Both number a text's tokens from
the row after that of padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, TensorNames
from workers.models.config_json.family import MAX_POSITIONS, MAX_SIZE, MAX_VOCAB, Family
from workers.models.config_json.score_section import SCORE_SUFFIX, has_score_head, with_score

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["BERT", "ROBERTA"]


def _read_bert(file: ConfigFile) -> ModelConfig:
    """Read an encoder, or a cross-encoder with a head that scores a pair of texts."""
    config = _read(file)
    if not has_score_head(file):
        return config
    config = replace(config, names=TensorNames(encoder="bert"), score_head="bert")
    return with_score(config, file)


def _read_roberta(file: ConfigFile) -> ModelConfig:
    """Read an encoder, or a cross-encoder with a head that scores a pair of texts."""
    config = _read(file)
    # It is a token and a position, and one position must be left after it.
    highest = min(config.vocab_size - 1, config.max_positions - 2)
    padding_id = file.integer("pad_token_id", 1, least=0, most=highest)
    config = replace(
        config,
        names=TensorNames(encoder="roberta"),
        max_positions=config.max_positions - padding_id - 1,
        position_padding_id=padding_id,
    )
    return with_score(config, file) if has_score_head(file) else config


def _read(file: ConfigFile) -> ModelConfig:
    file.choice("hidden_act", ("gelu",), "gelu")
    file.choice("position_embedding_type", ("absolute",), "absolute")
    for key in ("is_decoder", "add_cross_attention"):
        if file.flag(key, False):
            raise file.rejection(key, "must be false")
    # An encoder has no head and generates nothing; the others are of cross-encoders.
    file.note_read("tie_word_embeddings", "eos_token_id")
    file.note_read("sentence_transformers", "sbert_ce_default_activation_function")
    hidden_size = file.integer("hidden_size", most=MAX_SIZE)
    num_heads = file.integer("num_attention_heads", most=MAX_SIZE)
    if hidden_size % num_heads:
        raise file.rejection(
            "hidden_size",
            f"must be a multiple of num_attention_heads {num_heads}, not {hidden_size}",
        )
    return ModelConfig(
        name=file.path.resolve().parent.name,
        folder=file.path.parent,
        vocab_size=file.integer("vocab_size", most=MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=file.integer("intermediate_size", most=MAX_SIZE),
        num_layers=file.integer("num_hidden_layers", most=1024),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        max_positions=file.integer("max_position_embeddings", most=MAX_POSITIONS),
        norm_kind="layer",
        activation="gelu",
        norm_eps=file.number("layer_norm_eps", 1e-12, most=1.0),
        is_encoder=True,
        task="embed",
        num_token_types=file.integer("type_vocab_size", 2, most=MAX_SIZE),
    )


BERT = Family(
    architecture="BertModel",
    model_types=("bert",),
    reader=_read_bert,
    aliases=(f"Bert{SCORE_SUFFIX}",),
)
ROBERTA = Family(
    architecture="RobertaModel",
    model_types=("roberta", "xlm-roberta"),
    reader=_read_roberta,
    aliases=("XLMRobertaModel", f"Roberta{SCORE_SUFFIX}", f"XLMRoberta{SCORE_SUFFIX}"),
)
