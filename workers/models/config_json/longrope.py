"""LongRoPE (Ding et al. 2024) in Phi-3: each pair of a head has a factor, `short` and `long`.

In transformers, the long factors apply to the whole sequence once it exceeds the original context
length, and its KV cache would have to be computed again. As in vLLM, the engine's maximum length
decides for all sequences: up to the original length the short factors apply, beyond it the long
factors. The original length is the default.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import LongContext, RopeConfig
from workers.models.config_json.config_file import MISSING
from workers.models.config_json.limits import MAX_FACTOR, MAX_POSITIONS, MAX_THETA
from workers.models.config_json.rope_section import kind_key, rope_section, rotary_size

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["read_longrope"]

_DEFAULT_ORIGINAL = 4096
_NAMES = ("longrope", "su", "yarn")


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
