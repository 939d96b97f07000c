"""Reads rotary position embeddings from `config.json`, in the formats of transformers 4 and 5."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from pagedray.model_config import LongContext, ModelConfig, RopeConfig
from workers.models.config_json.config_file import MISSING, ConfigFile
from workers.models.config_json.family import MAX_FACTOR, MAX_POSITIONS, MAX_THETA

__all__ = [
    "kind_key",
    "longest_context",
    "read_longrope",
    "rope_of",
    "rope_section",
    "ropes_by_layer_type",
    "rotary_size",
    "with_rope",
]

_Kind = Literal["default", "mrope", "linear", "dynamic", "llama3", "yarn"]
_KINDS: tuple[_Kind, ...] = ("default", "mrope", "linear", "dynamic", "llama3", "yarn")
# Each belongs to some kinds; as in transformers, the others ignore it.
_KEYS_OF_KINDS = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "finetuned", "type", "rope_type"),
    # The authors' name of a factor of yarn, which transformers reads as attention_factor only.
    "attn_factor",
    # How images and videos divide the pairs of a head among their three positions, which are equal
    # for text.
    *("mrope_section", "mrope_interleaved"),
)

_DEFAULT_ORIGINAL = 4096
_NAMES = ("longrope", "su", "yarn")


def rope_section(file: ConfigFile) -> ConfigFile:
    """Return `rope_scaling` (transformers 4) unless it is empty, else `rope_parameters`."""
    file.note_read("rope_parameters")
    return file.section("rope_scaling" if file.value("rope_scaling") else "rope_parameters")


def kind_key(section: ConfigFile) -> str:
    """Return the key that names the kind of rope; if there are both, `rope_type` does."""
    return "type" if "type" in section and "rope_type" not in section else "rope_type"


def with_rope(
    config: ModelConfig,
    file: ConfigFile,
    *,
    default_theta: float = 10000.0,
    default_rotary_factor: float | None = None,
) -> ModelConfig:
    """Return the configuration with the rope of all layers.

    `default_rotary_factor` is the part of each head that is rotated if the file does not say
    another; None rotates whole heads, and rejects other parts.
    """
    theta = file.number("rope_theta", default_theta, most=MAX_THETA)
    section = rope_section(file)
    if default_rotary_factor is None:
        file.reject_unless("partial_rotary_factor", 1)
        section.reject_unless("partial_rotary_factor", 1)
    rope = rope_of(section, file, default_theta=theta)
    if default_rotary_factor is not None:
        size = rotary_size(file, section, config.head_size, default_factor=default_rotary_factor)
        rope = replace(rope, rotary_size=size)
    return replace(config, rope=rope, max_positions=longest_context(config, rope))


def ropes_by_layer_type(
    file: ConfigFile, *, theta: float, window_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Return the ropes of layers without and with a sliding window; thetas are the defaults."""
    # Transformers 4 scales the layers without a window only.
    by_kind = file.section("rope_parameters")
    full_key, window_key = "full_attention", "sliding_attention"
    full, window = by_kind.section(full_key), by_kind.section(window_key)
    if "rope_parameters" not in file:
        full = file.section("rope_scaling")
        _check_type(full)
    elif "rope_scaling" in file:
        raise file.rejection("rope_scaling", "is not allowed together with rope_parameters")
    for key in by_kind.given_keys():
        if key not in (full_key, window_key):
            raise by_kind.rejection(key, f"is not allowed; use {full_key} and {window_key}")
    for section in (full, window):
        section.reject_unless("partial_rotary_factor", 1)
    return (
        rope_of(full, file, default_theta=theta),
        rope_of(window, file, default_theta=window_theta),
    )


def _check_type(section: ConfigFile) -> None:
    """Raise CheckpointError if transformers scales nothing, since only `type` names the kind."""
    if kind_key(section) == "type" and section.value("type") not in ("default", "dynamic"):
        raise section.rejection("type", "has no effect in this family; use rope_type instead")


def rotary_size(
    file: ConfigFile, section: ConfigFile, head_size: int, *, default_factor: float = 1.0
) -> int:
    """Return how many elements of a head are rotated."""
    whole = file.number("partial_rotary_factor", default_factor, most=1.0)
    size = int(head_size * section.number("partial_rotary_factor", whole, most=1.0))
    if size % 2 or not size:
        raise section.rejection(
            "partial_rotary_factor",
            f"must result in an even size of the rotated part of each head, not {size}",
        )
    return size


def rope_of(section: ConfigFile, file: ConfigFile, *, default_theta: float) -> RopeConfig:
    """Return the rope of one section of a file, of whole heads."""
    for key in section.keys_of_objects():
        raise section.rejection(key, "is an object, but rope must be the same for all layers")
    section.note_read(*_KEYS_OF_KINDS)
    file.note_read("original_max_position_embeddings")
    theta = section.number("rope_theta", default_theta, most=MAX_THETA)
    # Only the default kind has no factor, so that its name may be missing.
    default = MISSING if "factor" in section else "default"
    given = section.choice(kind_key(section), _KINDS, default)
    kind = next(word for word in _KINDS if word == given)
    if kind == "default" or kind == "mrope":
        return RopeConfig(theta=theta)
    if kind == "yarn":
        return _yarn(section, file, theta)
    factor = section.number("factor", most=MAX_FACTOR)
    if kind == "dynamic":
        # It changes nothing before the longest sequence that config.json allows.
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    low = section.number("low_freq_factor", most=MAX_FACTOR)
    high = section.number("high_freq_factor", most=MAX_FACTOR)
    if high <= low:
        raise section.rejection("high_freq_factor", f"must be more than low_freq_factor {low:g}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_original_max_positions(section, file),
    )


def _yarn(section: ConfigFile, file: ConfigFile, theta: float) -> RopeConfig:
    original = _original_max_positions(section, file)
    longest = file.integer("max_position_embeddings", most=MAX_POSITIONS)
    default_factor = longest / original if section.has_null("factor") else MISSING
    factor = section.number("factor", default_factor, most=MAX_FACTOR)
    fast = section.number("beta_fast", 32.0, most=MAX_FACTOR)
    slow = section.number("beta_slow", 1.0, most=MAX_FACTOR)
    if slow >= fast:
        raise section.rejection("beta_fast", f"must be more than beta_slow {slow:g}")
    if theta <= 1.0:
        raise section.rejection("rope_theta", f"must be above 1, not {theta:g}")
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        # Transformers takes null for false.
        is_range_rounded=section.flag("truncate", not section.has_null("truncate")),
        magnitude=section.number(
            "attention_factor", _yarn_magnitude(section, factor), most=MAX_FACTOR
        ),
    )


def _yarn_magnitude(section: ConfigFile, factor: float) -> float:
    """Return the factor of cosines and sines, which offsets the softmax over more positions."""

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    keys = ("mscale", "mscale_all_dim")
    if not all(section.value(key) for key in keys):
        return of(1.0)
    one, all_dims = (section.number(key, most=MAX_FACTOR) for key in keys)
    return of(one) / of(all_dims)


def longest_context(config: ModelConfig, rope: RopeConfig) -> int:
    """Return the context length, which yarn extends by its factor."""
    if rope.kind != "yarn":
        return config.max_positions
    extended = int(min(rope.factor * rope.original_max_positions, MAX_POSITIONS))
    return max(config.max_positions, extended)


def _original_max_positions(section: ConfigFile, file: ConfigFile) -> int:
    """Return the context length of pretraining; as in transformers, that of the file wins."""
    key = "original_max_position_embeddings"
    if key in file:
        return file.integer(key, most=MAX_POSITIONS)
    whole = file.integer("max_position_embeddings", most=MAX_POSITIONS)
    return section.integer(key, whole, most=MAX_POSITIONS)


def read_longrope(
    file: ConfigFile, *, head_size: int, max_positions: int
) -> tuple[RopeConfig, int, LongContext | None]:
    """Return the rope of all layers, the number of positions it supports, and a longer context."""
    section = rope_section(file)
    size = rotary_size(file, section, head_size)
    section.note_read("factor", "type", "rope_type")
    theta = section.number(
        "rope_theta", file.number("rope_theta", 10000.0, most=MAX_THETA), most=MAX_THETA
    )
    # As with other kinds, a section with factors must name its kind.
    default = MISSING if "short_factor" in section else "default"
    kind = section.choice(kind_key(section), ("default", *_NAMES), default)
    if kind == "default":
        file.note_read("original_max_position_embeddings")
        return RopeConfig(theta=theta, rotary_size=size), max_positions, None
    original = file.integer(
        "original_max_position_embeddings", _DEFAULT_ORIGINAL, least=2, most=MAX_POSITIONS
    )
    # The file's own wins, as in transformers.
    section.note_read("original_max_position_embeddings")
    long_factors = section.numbers("long_factor", size // 2, most=MAX_FACTOR)
    rope = RopeConfig(
        kind="longrope",
        theta=theta,
        original_max_positions=original,
        pair_factors=section.numbers("short_factor", size // 2, most=MAX_FACTOR),
        magnitude=_magnitude(section, max_positions / original, original),
        rotary_size=size,
    )
    if max_positions <= original:
        return rope, max_positions, None
    return rope, original, LongContext(replace(rope, pair_factors=long_factors), max_positions)


def _magnitude(section: ConfigFile, ratio: float, original: int) -> float:
    """Return the factor of cosines and sines, which offsets the softmax over more positions."""
    factor = section.number("factor", ratio, most=MAX_FACTOR)
    fitting = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return section.number("attention_factor", fitting, most=MAX_FACTOR)
