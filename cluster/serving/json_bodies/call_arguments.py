"""The arguments of tool calls, which clients repeat as JSON inside of a string."""

from __future__ import annotations

import re
from math import isinf

from pydantic_core import from_json

from pagedray.errors import InvalidRequestError

__all__ = ["read_arguments"]

_MAY_BE_INFINITE = re.compile(r"\d[eE]\+?\d|\d{309}")
"""Matches in every text with a number that exceeds the range of a double."""


def read_arguments(text: str, param: str) -> dict[str, object]:
    """Return the arguments of a call, none if the text is empty. Raises InvalidRequestError."""
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{param} must be a JSON object as a string.", param=param)
    if _MAY_BE_INFINITE.search(text) and _has_infinity(arguments):
        raise InvalidRequestError(
            f"{param} has a number that exceeds the range of a double.", param=param
        )
    return arguments


def _has_infinity(arguments: dict[str, object]) -> bool:
    waiting: list[object] = [arguments]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, float) and isinf(one):
            return True
    return False
