"""ALiBi (Press, Smith and Lewis 2022), and the configuration of the families that use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig
from workers.models.config_json.family import check_causal, eos_token_ids
from workers.models.config_json.limits import MAX_VOCAB

if TYPE_CHECKING:
    from pagedray.model_config import Activation, TensorNames
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["DEFAULT_BIAS_MAX", "alibi_config", "alibi_slopes"]

DEFAULT_BIAS_MAX = 8.0


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
    architecture: str,
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
        architecture=architecture,
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
