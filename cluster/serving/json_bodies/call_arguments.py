"""The arguments of tool calls, which clients repeat as JSON inside of a string."""

from __future__ import annotations

import json
import re

from pydantic_core import from_json

from pagedray.errors import InvalidRequestError

__all__ = ["read_arguments"]

_NO_ARGUMENTS = ("", "null", '""')
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_ESCAPES = 2**15
"""Backslashes of arguments in which halves of characters are replaced."""


def read_arguments(text: str, param: str) -> dict[str, object]:
    """Return the arguments of a call, none if the text is empty. Raises InvalidRequestError.

    The end of the arguments is missing if the call was cut off.
    """
    if text.strip() in _NO_ARGUMENTS:
        return {}
    try:
        arguments = _parsed(text)
    except ValueError:
        arguments = _without_halves(text)
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{param} must be a JSON object as a string.", param=param)
    try:
        # The encoder finds infinite numbers faster than Python code does.
        json.dumps(arguments, allow_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"{param} has a number that exceeds the range of a double.", param=param
        ) from error
    return arguments


def _parsed(text: str) -> object:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if not str(error).startswith("EOF while parsing"):
            raise
    return from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")


def _without_halves(text: str) -> object:
    """Return a text with a replacement for each half of a character."""
    if _HALF.search(text) is None or text.count("\\") > _MAX_ESCAPES:
        return None
    try:
        return _parsed(_ESCAPE.sub(_whole_escape, text))
    except ValueError:
        return None


def _whole_escape(found: re.Match[str]) -> str:
    return found[0] if found["half"] is None else "\\ufffd"
