"""Reads the value of an argument that is the text of an element: a string as it is, or JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn

from cluster.structured.grammar.schemas.schema_keywords import types_of_value

if TYPE_CHECKING:
    from collections.abc import Set

__all__ = ["read_value"]


def read_value(text: str, kinds: Set[str]) -> object:
    """Return the value of a text; one that is not JSON of an allowed type is a string.

    `kinds` are the types that the schema allows, empty if it does not specify them.
    """
    if kinds == {"string"}:
        return text
    written = text.strip()
    if "boolean" in kinds and written.lower() in ("true", "false"):
        written = written.lower()
    try:
        value = json.loads(written, parse_constant=_reject)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    is_string = "string" in kinds and types_of_value(value).isdisjoint(kinds)
    return text if is_string else value


def _reject(name: str) -> NoReturn:
    raise ValueError(name)
