"""Reads the shape of a BART model from `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedray.model_config import Dtype
from workers.models.config_json.config_file import ConfigFile
from workers.models.config_json.family import MAX_POSITIONS, model_dtype

_ARCHITECTURES = ("BartForConditionalGeneration", "BartModel")
_MAX_SIZE = 2**20
_MAX_VOCAB = 2**24
_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """The shape of the encoder's layers, or of the decoder's."""

    num_layers: int
    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig:
    """The shape of an encoder and a decoder that share a vocabulary."""

    folder: Path
    """The checkpoint folder."""
    vocab_size: int
    hidden_size: int
    num_heads: int
    """Heads of every layer of both stacks: their keys share one cache."""
    max_positions: int
    encoder: StackConfig
    decoder: StackConfig
    has_scaled_embedding: bool
    """Whether embeddings of tokens are multiplied by the root of the hidden size."""
    dtype: Dtype
    first_token_id: int
    """The first token of the decoder."""
    eos_token_ids: tuple[int, ...]

    @property
    def head_size(self) -> int:
        """Return the size of a head."""
        return self.hidden_size // self.num_heads


def read_bart_config(folder: Path, *, dtype: Dtype | None = None) -> BartConfig:
    """Return the shape of the checkpoint in a folder; `dtype` overrides that of the file.

    Raises CheckpointError.
    """
    file = ConfigFile.read(folder / "config.json")
    architectures = file.words("architectures")
    if not set(architectures) & set(_ARCHITECTURES):
        raise file.rejection("architectures", f"must name one of {', '.join(_ARCHITECTURES)}")
    file.choice("activation_function", ("gelu",), "gelu")
    hidden_size = file.integer("d_model", most=_MAX_SIZE)
    num_heads = file.integer("decoder_attention_heads", most=_MAX_SIZE)
    if file.integer("encoder_attention_heads", most=_MAX_SIZE) != num_heads:
        raise file.rejection("encoder_attention_heads", f"must be {num_heads}, as in the decoder")
    if hidden_size % num_heads:
        raise file.rejection(
            "d_model", f"must be a multiple of {num_heads} heads, not {hidden_size}"
        )
    vocab_size = file.integer("vocab_size", most=_MAX_VOCAB)
    return BartConfig(
        folder=folder,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        max_positions=file.integer("max_position_embeddings", most=MAX_POSITIONS),
        encoder=_stack(file, "encoder"),
        decoder=_stack(file, "decoder"),
        has_scaled_embedding=file.flag("scale_embedding", False),
        dtype=dtype or model_dtype(file) or "float32",
        first_token_id=file.integer("decoder_start_token_id", 2, least=0, most=vocab_size - 1),
        eos_token_ids=file.token_ids("eos_token_id"),
    )


def _stack(file: ConfigFile, name: str) -> StackConfig:
    return StackConfig(
        num_layers=file.integer(f"{name}_layers", most=_MAX_LAYERS),
        intermediate_size=file.integer(f"{name}_ffn_dim", most=_MAX_SIZE),
    )
