"""The ids and names of tool calls that clients send back."""

from __future__ import annotations

from pagedray.errors import InvalidRequestError

__all__ = ["MAX_ID_LENGTH", "check_id"]

MAX_ID_LENGTH = 128
"""Characters of an id or a name."""


def check_id(text: str, param: str) -> None:
    """Raise InvalidRequestError if a text is too long for an id or name, or empty."""
    if not 0 < len(text) <= MAX_ID_LENGTH:
        raise InvalidRequestError(
            f"{param} must have 1 to {MAX_ID_LENGTH} characters.", param=param
        )
