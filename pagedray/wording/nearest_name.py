"""Finds the name that a misspelled one most likely stands for."""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["misspelled_name", "nearest_name"]

_LEAST_LIKENESS = 0.75
"""The likeness of `tyep` and `type`, in which two of four letters are swapped."""
_SHORTEST_NAME = 4
_LONGEST_NAME = 32
"""Letters of names that are compared by their spellings."""


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the most similar of the known names, or None if none is similar."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=_LEAST_LIKENESS)
    return found[0] if found else None


def misspelled_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name of which a name is another spelling, or None.

    The spelling differs by one letter, or by underscores and capitals. Unlike `nearest_name`, this
    is fast enough for names that are likely right.
    """
    if len(name) > _LONGEST_NAME:
        return None
    spellings = _spellings(name)
    return next((one for one in known if not spellings.isdisjoint(_known_spellings(one))), None)


def _spellings(name: str) -> frozenset[str]:
    """Return a name and what is left of it without one of its letters."""
    plain = name.replace("_", "").lower()
    return frozenset((plain, *(plain[:at] + plain[at + 1 :] for at in range(len(plain)))))


@functools.cache
def _known_spellings(name: str) -> frozenset[str]:
    return _spellings(name) if len(name) >= _SHORTEST_NAME else frozenset()
