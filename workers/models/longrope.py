"""LongRoPE (Ding et al. 2024) in Phi-3: each pair of a head has a factor, `short` and `long`.

The long factors apply to the whole sequence once it exceeds the original context length, so that
its KV cache would have to be computed again. This is not supported: the context is limited to the
original length, where the short factors apply.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pagedray.config import RopeConfig
from workers.models.config_file import MISSING
from workers.models.rope_section import MAX_THETA, rope_section

if TYPE_CHECKING:
    from workers.models.config_file import ConfigFile

__all__ = ["read_longrope"]

_DEFAULT_ORIGINAL = 4096
_MAX_FACTOR = 1e6
_MAX_POSITIONS = 2**26
_NAMES = ("longrope", "su", "yarn")


def read_longrope(
    file: ConfigFile, *, head_size: int, max_positions: int
) -> tuple[RopeConfig, int]:
    """Return the rope of all layers, and the number of positions that it supports."""
    section = rope_section(file)
    size = _rotary_size(file, section, head_size)
    theta = section.number(
        "rope_theta", file.number("rope_theta", 10000.0, most=MAX_THETA), most=MAX_THETA
    )
    # As with other kinds, a section with factors must name its kind.
    default = MISSING if "short_factor" in section else "default"
    kind = section.choice(section.first_of("type", "rope_type"), ("default", *_NAMES), default)
    if kind == "default":
        return RopeConfig(theta=theta, rotary_size=size), max_positions
    original = file.integer(
        "original_max_position_embeddings", _DEFAULT_ORIGINAL, least=2, most=_MAX_POSITIONS
    )
    section.numbers("long_factor", size // 2, most=_MAX_FACTOR)
    rope = RopeConfig(
        kind="longrope",
        theta=theta,
        original_max_positions=original,
        pair_factors=section.numbers("short_factor", size // 2, most=_MAX_FACTOR),
        magnitude=_magnitude(section, max_positions / original, original),
        rotary_size=size,
    )
    return rope, min(original, max_positions)


def _rotary_size(file: ConfigFile, section: ConfigFile, head_size: int) -> int:
    whole = file.number("partial_rotary_factor", 1.0, most=1.0)
    size = int(head_size * section.number("partial_rotary_factor", whole, most=1.0))
    if size % 2 or not size:
        raise section.refusal(
            "partial_rotary_factor",
            f"must give an even size of the rotated part of each head, not {size}",
        )
    return size


def _magnitude(section: ConfigFile, ratio: float, original: int) -> float:
    """Return the factor of cosines and sines, which offsets the softmax over more positions."""
    factor = section.number("factor", ratio, most=_MAX_FACTOR)
    fitting = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return section.number("attention_factor", fitting, most=_MAX_FACTOR)
