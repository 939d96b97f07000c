"""JSON bodies as Python objects, within limits that the event loop can afford.

Parsing costs time per object rather than per byte and blocks the event loop, so objects are
counted before they are made.
"""

from __future__ import annotations

from pydantic_core import from_json

from pagedray.errors import InvalidRequestError

__all__ = ["check_counts", "read_json"]

_MAX_CONTAINERS = 2**13
_MAX_STRINGS = 2**15
_MAX_VALUES = 2**20


def read_json(raw: bytes) -> dict[str, object]:
    """Return the JSON object of a body. Raises InvalidRequestError.

    Duplicate names in an object are rejected, because a proxy might read the other value.
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
    """Raise InvalidRequestError, naming `what`, if there are too many objects to parse."""
    quotes, containers, commas = _count(raw)
    if quotes <= 2 * _MAX_STRINGS and containers <= _MAX_CONTAINERS and commas <= _MAX_VALUES:
        return
    # Quotes, brackets and commas inside strings made the count too high.
    unescaped = _unescaped(raw)
    num_strings = unescaped.count(b'"') // 2
    _check(f"{what} may have at most {{}} strings, not {{}}.", num_strings, _MAX_STRINGS)
    _, num_containers, num_commas = _count(_between_strings(unescaped))
    _check(
        f"{what} may have at most {{}} arrays and objects, not {{}}.",
        num_containers,
        _MAX_CONTAINERS,
    )
    _check(f"{what} may have at most {{}} values, not {{}}.", num_commas, _MAX_VALUES)


def _check_names(raw: bytes, parsed: dict[str, object]) -> None:
    # Each name is followed by a colon, but of duplicates only one was kept.
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
        raise InvalidRequestError("The body has an object with a duplicate name.")


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
