"""Writes values of clients in error messages."""

from __future__ import annotations

import json
from collections.abc import Mapping

__all__ = ["shown_json_value", "shown_value"]

_MOST_CHARACTERS = 40


def shown_value(value: object) -> str:
    """Return a short text of a value, however large it is."""
    # Formatting all of a large one would hold the event loop.
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


def shown_json_value(value: object) -> str:
    """Return a short text of a value of a JSON or YAML document."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # 5.0 is not an integer.
        return json.dumps(value)
    return shown_value(value)
