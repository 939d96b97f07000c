"""Reads BERT from `config.json`: post-norm, absolute positions, GELU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.config import ModelConfig
from workers.models.family import MAX_POSITIONS, Family, model_dtype

if TYPE_CHECKING:
    from workers.models.config_file import ConfigFile

__all__ = ["BERT"]

_MAX_SIZE = 2**20
_MAX_VOCAB = 2**24


def _read(file: ConfigFile) -> ModelConfig:
    file.choice("hidden_act", ("gelu",), "gelu")
    file.choice("position_embedding_type", ("absolute",), "absolute")
    for key in ("is_decoder", "add_cross_attention"):
        if file.flag(key, False):
            raise file.refusal(key, "must be false")
    hidden_size = file.integer("hidden_size", most=_MAX_SIZE)
    num_heads = file.integer("num_attention_heads", most=_MAX_SIZE)
    if hidden_size % num_heads:
        raise file.refusal(
            "hidden_size",
            f"must be a multiple of num_attention_heads {num_heads}, not {hidden_size}",
        )
    return ModelConfig(
        name=file.path.resolve().parent.name,
        folder=file.path.parent,
        architecture=BERT.architecture,
        vocab_size=file.integer("vocab_size", most=_MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=file.integer("intermediate_size", most=_MAX_SIZE),
        num_layers=file.integer("num_hidden_layers", most=1024),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        max_positions=file.integer("max_position_embeddings", most=MAX_POSITIONS),
        norm_kind="layer",
        activation="gelu",
        norm_eps=file.number("layer_norm_eps", 1e-12, most=1.0),
        is_encoder=True,
        num_token_types=file.integer("type_vocab_size", 2, most=_MAX_SIZE),
        dtype=model_dtype(file),
    )


BERT = Family(architecture="BertModel", read=_read)
