"""Reads rotary position embeddings from `config.json`, in the formats of transformers 4 and 5."""

from __future__ import annotations

from typing import Literal

from pagedray.config import RopeConfig
from workers.models.config_file import MISSING, ConfigFile

__all__ = ["MAX_THETA", "read_rope", "rope_of", "rope_section"]

MAX_THETA = 1e12
_MAX_FACTOR = 1e6
_MAX_POSITIONS = 2**26
_Kind = Literal["default", "linear", "llama3"]
_KINDS: tuple[_Kind, ...] = ("default", "linear", "llama3")


def rope_section(file: ConfigFile) -> ConfigFile:
    """Return `rope_parameters` (transformers 5), or `rope_scaling` (transformers 4)."""
    return file.section("rope_parameters" if "rope_parameters" in file else "rope_scaling")


def read_rope(file: ConfigFile) -> RopeConfig:
    """Return the rope that all layers share."""
    file.refuse_unless("partial_rotary_factor", 1)
    theta = file.number("rope_theta", 10000.0, most=MAX_THETA)
    return rope_of(rope_section(file), default_theta=theta)


def rope_of(section: ConfigFile, *, default_theta: float) -> RopeConfig:
    """Return the rope of one section."""
    section.refuse_unless("partial_rotary_factor", 1)
    for key in section.given_keys():
        if isinstance(section.value(key), dict):
            raise section.refusal(key, "is an object, but rope must not differ by layer")
    theta = section.number("rope_theta", default_theta, most=MAX_THETA)
    # Only the default kind has no factor, so that its name may be missing.
    default = MISSING if "factor" in section else "default"
    given = section.choice(section.first_of("type", "rope_type"), _KINDS, default)
    kind = next(word for word in _KINDS if word == given)
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
            "original_max_position_embeddings", most=_MAX_POSITIONS
        ),
    )
