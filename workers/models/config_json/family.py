"""The keys of `config.json` that most decoders share.

Each family is one module. It reads its own keys and leaves the others to `base_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from pagedray.model_config import Activation, Dtype, ModelConfig
from workers.models.config_json.config_file import ConfigFile
from workers.models.config_json.limits import (
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SIZE,
    MAX_VOCAB,
)

__all__ = [
    "Family",
    "base_config",
    "check_causal",
    "eos_token_ids",
    "model_dtype",
]

_FP8 = "float8_e4m3fn"
# The key and the names of each activation.
_ACTIVATIONS: dict[Activation, tuple[str, tuple[str, ...]]] = {
    "silu": ("hidden_act", ("silu", "swish")),
    "gelu_tanh": ("hidden_activation", ("gelu_pytorch_tanh",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: the checkpoints of one architecture."""

    architecture: str
    """Its name in `architectures` of config.json."""
    model_types: tuple[str, ...]
    """Its names in `model_type` of config.json."""
    read: Callable[[ConfigFile], ModelConfig]
    aliases: tuple[str, ...] = ()
    """Other names of the same architecture."""
    reads_quantization: bool = False
    """Whether it reads `quantization_config` itself."""


def base_config(
    file: ConfigFile,
    architecture: str,
    *,
    activation: Activation = "silu",
    activation_key: str | None = None,
    default_num_kv_heads: int | None = None,
    default_head_size: int | None = None,
    norm_eps_key: str = "rms_norm_eps",
    default_norm_eps: float = 1e-6,
    is_tied_by_default: bool = False,
) -> ModelConfig:
    """Return a configuration of the keys that most families share.

    Defaults stand for missing keys. The rope is left to the family.
    """
    check_causal(file)
    key, words = _ACTIVATIONS[activation]
    file.choice(activation_key or key, words, words[0])
    # Families with one of these keys ignore the other, as in transformers.
    file.note_read(*(name for name, _ in _ACTIVATIONS.values()))
    hidden_size = file.integer("hidden_size", most=MAX_SIZE)
    num_heads = file.integer("num_attention_heads", most=MAX_HEADS)
    num_kv_heads = file.integer(
        "num_key_value_heads", default_num_kv_heads or num_heads, most=MAX_HEADS
    )
    if num_heads % num_kv_heads:
        raise file.rejection(
            "num_attention_heads",
            f"must be a multiple of num_key_value_heads {num_kv_heads}, not {num_heads}",
        )
    vocab_size = file.integer("vocab_size", most=MAX_VOCAB)
    return ModelConfig(
        name=file.path.resolve().parent.name,
        folder=file.path.parent,
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=file.integer("intermediate_size", most=MAX_SIZE),
        num_layers=file.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=_head_size(file, hidden_size, num_heads, default_head_size),
        max_positions=file.integer("max_position_embeddings", most=MAX_POSITIONS),
        norm_eps=file.number(norm_eps_key, default_norm_eps, most=1.0),
        activation=activation,
        has_tied_embeddings=file.flag("tie_word_embeddings", is_tied_by_default),
        eos_token_ids=eos_token_ids(file, vocab_size),
    )


def check_causal(file: ConfigFile) -> None:
    """Raise CheckpointError for a decoder with tokens that attend to later tokens."""
    if file.has_null("is_causal") or not file.flag("is_causal", True):
        raise file.rejection("is_causal", "must be true, since an encoder cannot generate")


def eos_token_ids(file: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """Return the EOS ids that the vocabulary has."""
    return tuple(token_id for token_id in file.token_ids("eos_token_id") if token_id < vocab_size)


def model_dtype(file: ConfigFile) -> Dtype | None:
    """Return the dtype of weights and activations that a file names, or None."""
    # Transformers 5 writes dtype, 4 torch_dtype.
    key = file.first_of("dtype", "torch_dtype")
    # The dtype of quantized weights; the dtype of the computation is not stated.
    is_weight_dtype = file.value(key) == _FP8 and "quantization_config" in file
    if key not in file or is_weight_dtype:
        return None
    allowed: tuple[Dtype, ...] = get_args(Dtype)
    words = [word for name in allowed for word in (name, f"torch.{name}")]
    given = file.choice(key, words).removeprefix("torch.")
    return next(name for name in allowed if name == given)


def _head_size(file: ConfigFile, hidden_size: int, num_heads: int, default: int | None) -> int:
    if "head_dim" not in file and default is None and hidden_size % num_heads:
        raise file.rejection(
            "hidden_size",
            f"must be a multiple of num_attention_heads {num_heads}, not {hidden_size}",
        )
    size = file.integer("head_dim", default or hidden_size // num_heads, most=MAX_HEAD_SIZE)
    if size % 2:
        raise file.rejection("head_dim", f"must be even, not {size}")
    return size
