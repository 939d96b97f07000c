"""A JSON body as Python objects, if it is one that the event loop can afford to read.

Objects cost time by their number, not by their bytes, and the parser lets nothing run beside it:
they are counted before they are made.
"""

from __future__ import annotations

from pydantic_core import from_json

from pagedray.errors import InvalidRequestError

__all__ = ["read_json"]

_MAX_CONTAINERS = 2**13
_MAX_STRINGS = 2**15
_MAX_VALUES = 2**20


def read_json(raw: bytes) -> dict[str, object]:
    """Return the object that a body holds. Raises InvalidRequestError."""
    _check_counts(raw)
    try:
        parsed = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return parsed


def _check_counts(raw: bytes) -> None:
    quotes, containers, commas = _count(raw)
    if quotes <= 2 * _MAX_STRINGS and containers <= _MAX_CONTAINERS and commas <= _MAX_VALUES:
        return
    # Quotes, brackets and commas may also stand in a text; then the count was too high.
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = unescaped.count(b'"') // 2
    _check("strings", num_strings, _MAX_STRINGS)
    _, num_containers, num_commas = _count(b"".join(unescaped.split(b'"')[::2]))
    _check("lists and objects", num_containers, _MAX_CONTAINERS)
    _check("values", num_commas, _MAX_VALUES)


def _count(raw: bytes) -> tuple[int, int, int]:
    return raw.count(b'"'), raw.count(b"[") + raw.count(b"{"), raw.count(b",")


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(f"The body may have {most} {what}, not {count}.")
