"""Values that clients sent, written as JSON again."""

from __future__ import annotations

import json

import msgspec

from pagedray.errors import InvalidRequestError

__all__ = ["json_text"]


def json_text(value: object, param: str, *, most_bytes: int) -> str:
    """Return a value of the field `param` in JSON. Raises InvalidRequestError if it is longer."""
    # Much faster than the other encoder, which would hold the event loop for a large value.
    num_bytes = len(msgspec.json.encode(value))
    if num_bytes > most_bytes:
        raise InvalidRequestError(
            f"{param} may have at most {most_bytes} bytes of JSON, not {num_bytes}.", param=param
        )
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise InvalidRequestError(
            f"{param} contains a number that JSON cannot represent.", param=param
        ) from error
