"""The arguments of tool calls, which clients repeat as JSON inside of a string."""

from __future__ import annotations

import json

from pydantic_core import from_json

from pagedray.errors import InvalidRequestError

__all__ = ["read_arguments"]


def read_arguments(text: str, param: str) -> dict[str, object]:
    """Return the arguments of a call, none if the text is empty. Raises InvalidRequestError."""
    try:
        arguments = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
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
