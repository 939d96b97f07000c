"""What the families have in common: how `config.json` says a decoder's shape.

A family is one file beside this one. It reads what is its own and leaves the rest to `base_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from pagedray.config import Dtype, ModelConfig, RopeConfig
from workers.models.config_file import MISSING, ConfigFile

__all__ = ["MAX_POSITIONS", "Family", "base_config", "windows_of_layers"]

_MAX_SIZE = 2**20
_MAX_VOCAB = 2**24
_MAX_LAYERS = 1024
_MAX_HEADS = 2**14
_MAX_HEAD_SIZE = 1024
MAX_POSITIONS = 2**26
_MAX_THETA = 1e12
_MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of checkpoint."""

    architecture: str
    """Its word in `config.json`."""
    read: Callable[[ConfigFile], ModelConfig]


def base_config(
    file: ConfigFile,
    architecture: str,
    *,
    default_num_kv_heads: int | None = None,
    default_head_size: int | None = None,
) -> ModelConfig:
    """Return what all families say in the same words; the defaults are those of a missing key."""
    file.choice("hidden_act", ("silu", "swish"), "silu")
    hidden_size = file.integer("hidden_size", most=_MAX_SIZE)
    num_heads = file.integer("num_attention_heads", most=_MAX_HEADS)
    num_kv_heads = file.integer(
        "num_key_value_heads", default_num_kv_heads or num_heads, most=_MAX_HEADS
    )
    if num_heads % num_kv_heads:
        raise file.refusal(
            "num_attention_heads",
            f"must be a multiple of num_key_value_heads {num_kv_heads}, not {num_heads}",
        )
    vocab_size = file.integer("vocab_size", most=_MAX_VOCAB)
    bos_ids = file.token_ids("bos_token_id")
    return ModelConfig(
        name=file.path.resolve().parent.name,
        folder=file.path.parent,
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=file.integer("intermediate_size", most=_MAX_SIZE),
        num_layers=file.integer("num_hidden_layers", most=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=_head_size(file, hidden_size, num_heads, default_head_size),
        max_positions=file.integer("max_position_embeddings", most=MAX_POSITIONS),
        norm_eps=file.number("rms_norm_eps", 1e-6, most=1.0),
        rope=_rope(file),
        # All families of today leave them apart unless told otherwise.
        has_tied_embeddings=file.flag("tie_word_embeddings", False),
        dtype=_dtype(file),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(i for i in file.token_ids("eos_token_id") if i < vocab_size),
    )


def windows_of_layers(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows of a family whose layers differ, as Qwen's do; empty if none has one."""
    if not file.flag("use_sliding_window", False):
        return ()
    if "sliding_window" not in file:
        return ()
    window = file.integer("sliding_window", most=MAX_POSITIONS)
    kinds = file.words("layer_types")
    if not kinds:
        first = file.integer("max_window_layers", 28, least=0, most=_MAX_LAYERS)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise file.refusal("layer_types", f"must have {num_layers} entries, not {len(kinds)}")
    allowed = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        if kind not in allowed:
            raise file.refusal(
                "layer_types", f"may hold {' and '.join(allowed)}, not {kind[:40]!r}"
            )
    return tuple(allowed[kind] for kind in kinds)


def _head_size(file: ConfigFile, hidden_size: int, num_heads: int, default: int | None) -> int:
    if "head_dim" not in file and default is None and hidden_size % num_heads:
        raise file.refusal(
            "hidden_size",
            f"must be a multiple of num_attention_heads {num_heads}, not {hidden_size}",
        )
    size = file.integer("head_dim", default or hidden_size // num_heads, most=_MAX_HEAD_SIZE)
    if size % 2:
        raise file.refusal("head_dim", f"must be even, not {size}")
    return size


def _dtype(file: ConfigFile) -> Dtype:
    # Transformers 5 says dtype, 4 says torch_dtype; without either, weights are float32 to both.
    key = file.first_of("dtype", "torch_dtype")
    allowed: tuple[Dtype, ...] = get_args(Dtype)
    words = [word for name in allowed for word in (name, f"torch.{name}")]
    given = file.choice(key, words, "float32").removeprefix("torch.")
    return next(name for name in allowed if name == given)


def _rope(file: ConfigFile) -> RopeConfig:
    """Return rope as transformers 5 says it, in `rope_parameters`, or else as 4 does."""
    if "rope_parameters" in file:
        section = file.section("rope_parameters")
        top_theta = file.number("rope_theta", 10000.0, most=_MAX_THETA)
        theta = section.number("rope_theta", top_theta, most=_MAX_THETA)
    else:
        section = file.section("rope_scaling")
        theta = file.number("rope_theta", 10000.0, most=_MAX_THETA)
    _check_rope(file, section)
    kinds: tuple[Literal["default", "linear", "llama3"], ...] = ("default", "linear", "llama3")
    # Only the default kind has no factor, and may therefore go without a name.
    default = MISSING if "factor" in section else "default"
    given = section.choice(section.first_of("type", "rope_type"), kinds, default)
    kind = next(word for word in kinds if word == given)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = section.number("factor", most=_MAX_FACTOR)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    low = section.number("low_freq_factor", most=_MAX_FACTOR)
    high = section.number("high_freq_factor", most=_MAX_FACTOR)
    if high <= low:
        raise section.refusal("high_freq_factor", f"must be more than low_freq_factor {low:g}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=section.integer(
            "original_max_position_embeddings", most=MAX_POSITIONS
        ),
    )


def _check_rope(file: ConfigFile, section: ConfigFile) -> None:
    for place in (file, section):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.refusal("partial_rotary_factor", "must be 1")
    for key in section.given_keys():
        if isinstance(section.value(key), dict):
            raise section.refusal(key, "is an object, but all layers must share one rope")
