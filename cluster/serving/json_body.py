"""A JSON body as Python objects, if it is one that the event loop can afford to read.

Objects cost time by their number, not by their bytes, and the parser lets nothing run beside it:
they are counted before they are made.
"""

from __future__ import annotations

from pydantic_core import from_json

from pagedray.errors import InvalidRequestError

__all__ = ["check_counts", "read_json"]

_MAX_CONTAINERS = 2**13
_MAX_STRINGS = 2**15
_MAX_VALUES = 2**20


def read_json(raw: bytes) -> dict[str, object]:
    """Return the object that a body holds. Raises InvalidRequestError.

    An object may not have two members of the same name: whoever reads it along the way might take
    the other one.
    """
    check_counts(raw, "The body")
    try:
        parsed = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    _check_names(raw, parsed)
    return parsed


def check_counts(raw: bytes, what: str) -> None:
    """Raise InvalidRequestError, naming `what`, for more objects than can be afforded."""
    quotes, containers, commas = _count(raw)
    if quotes <= 2 * _MAX_STRINGS and containers <= _MAX_CONTAINERS and commas <= _MAX_VALUES:
        return
    # Quotes, brackets and commas may also stand in a text; then the count was too high.
    unescaped = _unescaped(raw)
    num_strings = unescaped.count(b'"') // 2
    _check(f"{what} may have {{}} strings, not {{}}.", num_strings, _MAX_STRINGS)
    _, num_containers, num_commas = _count(_between_strings(unescaped))
    _check(f"{what} may have {{}} lists and objects, not {{}}.", num_containers, _MAX_CONTAINERS)
    _check(f"{what} may have {{}} values, not {{}}.", num_commas, _MAX_VALUES)


def _check_names(raw: bytes, parsed: dict[str, object]) -> None:
    # Each name is followed by a colon; of two that are the same one is left.
    bare = _between_strings(_unescaped(raw))
    num_left = bare.count(b":")
    num_objects = bare.count(b"{")
    waiting: list[object] = [parsed]
    while waiting and num_objects:
        one = waiting.pop()
        if isinstance(one, dict):
            num_objects -= 1
            num_left -= len(one)
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    if num_left:
        raise InvalidRequestError("The body has an object with two members of the same name.")


def _unescaped(raw: bytes) -> bytes:
    if b"\\" not in raw:
        return raw
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"")


def _between_strings(unescaped: bytes) -> bytes:
    return b"".join(unescaped.split(b'"')[::2])


def _count(raw: bytes) -> tuple[int, int, int]:
    return raw.count(b'"'), raw.count(b"[") + raw.count(b"{"), raw.count(b",")


def _check(text: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(text.format(most, count))
