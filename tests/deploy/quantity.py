"""Quantities of Kubernetes, such as `4Gi`, and durations, such as `10m`, as numbers."""

from __future__ import annotations

import re

__all__ = ["parse_quantity", "seconds_of"]

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_quantity(text: str) -> int:
    """Return a quantity in bytes. Raises ValueError for one that is no whole number."""
    found = re.fullmatch(r"([0-9]+)([a-zA-Z]*)", text)
    if found is None or found[2] not in _UNITS | _BINARY_UNITS:
        raise ValueError(f"{text!r} is no whole quantity of bytes")
    return int(found[1]) * (_UNITS | _BINARY_UNITS)[found[2]]


def seconds_of(text: str) -> float:
    """Return a duration in seconds. Raises KeyError for one of several parts."""
    number, unit = re.findall(r"^([0-9]+)(ms|s|m|h)$", text)[0]
    return int(number) * {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}[unit]
