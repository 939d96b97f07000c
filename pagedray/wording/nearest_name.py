"""Finds the name that a misspelled one most likely stands for."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["nearest_name"]

_LEAST_LIKENESS = 0.75
"""The likeness of `tyep` and `type`, in which two of four letters are swapped."""


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the most similar of the known names, or None if none is similar."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=_LEAST_LIKENESS)
    return found[0] if found else None
