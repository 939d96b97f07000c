"""Texts of values, numbers and names in error messages."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Collection, Iterable, Mapping

__all__ = ["misspelled_name", "nearest_name", "pluralize", "quote", "quote_json"]

_MOST_CHARACTERS = 40

_LEAST_LIKENESS = 0.75
"""The likeness of `tyep` and `type`, in which two of four letters are swapped."""
_SHORTEST_NAME = 4
_LONGEST_NAME = 32
"""Letters of names that are compared by their spellings."""


def quote(value: object) -> str:
    """Return a short text of a value, however large it is."""
    # Formatting all of a large mapping would block the event loop.
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and abs(value) > 10**30:
        # Python refuses to format very long integers.
        return "a number of more than 30 digits"
    if isinstance(value, str):
        value = value[:_MOST_CHARACTERS]
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def quote_json(value: object) -> str:
    """Return a short text of a value of a JSON or YAML document."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # 5.0 is not an integer.
        return json.dumps(value)
    return quote(value)


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1; the plural only adds an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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
    """Return a name, and the name without each of its letters in turn."""
    plain = name.replace("_", "").lower()
    return frozenset((plain, *(plain[:at] + plain[at + 1 :] for at in range(len(plain)))))


@functools.cache
def _known_spellings(name: str) -> frozenset[str]:
    return _spellings(name) if len(name) >= _SHORTEST_NAME else frozenset()
