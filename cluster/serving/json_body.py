"""JSON that clients send as Python objects, and values written as JSON again.

Parsing costs time and memory per object rather than per byte, so objects are counted before they
are made.
"""

from __future__ import annotations

import json
import re
from math import isinf

import msgspec
from pydantic_core import from_json

from cluster.serving.intake import LARGEST, RequestSize
from pagedray.errors import ContextLengthError, InvalidRequestError
from pagedray.text import quote

__all__ = ["check_counts", "json_text", "read_arguments", "read_json"]

_MAX_CONTAINERS = 2**13
_MAX_STRINGS = 2**15
_ONE_BRACKET = bytes.maketrans(b"[{}", b"]]]")
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 309
"""Without an exponent, numbers of fewer digits are in the range of a double."""

_NO_ARGUMENTS = ("", "null", '""')
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_ESCAPES = 2**15
"""Backslashes of arguments in which halves of characters are replaced."""


def read_json(
    raw: bytes, size: RequestSize = LARGEST, *, what: str = "The body"
) -> dict[str, object]:
    """Return the JSON object in `raw`. Raises InvalidRequestError, naming `what`.

    Duplicate names in an object are rejected, because a proxy might read the other value, and so
    are numbers that would be read as infinite.
    """
    check_counts(raw, what, size)
    try:
        parsed = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"{what} is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{what} must be a JSON object.")
    _check_values(raw, parsed, what)
    return parsed


def check_counts(raw: bytes, what: str, size: RequestSize = LARGEST) -> None:
    """Raise InvalidRequestError, naming `what`, if there are too many objects to parse."""
    quotes, containers, commas = _count(raw)
    num_fewest = min(size.num_list_values, size.num_values)
    if quotes <= 2 * _MAX_STRINGS and containers <= _MAX_CONTAINERS and commas <= num_fewest:
        return
    # Quotes, brackets and commas inside strings made the count too high.
    num_strings, bare = _outside_strings(raw)
    _check(f"{what} may have at most {{}} strings, not {{}}.", num_strings, _MAX_STRINGS)
    _, num_containers, num_commas = _count(bare)
    _check(
        f"{what} may have at most {{}} arrays and objects, not {{}}.",
        num_containers,
        _MAX_CONTAINERS,
    )
    if num_commas > num_fewest:
        num_entries = 1 + max(part.count(b",") for part in bare.translate(_ONE_BRACKET).split(b"]"))
        if num_entries > size.num_list_values:
            raise ContextLengthError(
                f"{what} has a list or an object of {num_entries} entries, but the context length "
                f"of {size.context} (--max-model-len) allows at most {size.num_list_values}."
            )
    _check(f"{what} may have at most {{}} values, not {{}}.", num_commas, size.num_values)


def _check_values(raw: bytes, parsed: dict[str, object], what: str) -> None:
    """Raise InvalidRequestError for a duplicate name, or a number that was read as infinite."""
    # Each name is followed by a colon, but of duplicates only the last was kept.
    _, bare = _outside_strings(raw)
    num_left = bare.count(b":")
    num_objects = bare.count(b"{")
    may_be_infinite = _may_be_infinite(bare)
    waiting: list[object] = [parsed]
    while waiting and (num_objects or may_be_infinite):
        container = waiting.pop()
        if isinstance(container, dict):
            num_objects -= 1
            num_left -= len(container)
            values = list(container.values())
        else:
            assert isinstance(container, list)
            values = container
        waiting += [value for value in values if isinstance(value, dict | list)]
        if may_be_infinite and any(isinstance(value, float) and isinf(value) for value in values):
            raise _out_of_range(container, what, is_field=container is parsed)
    if num_left:
        raise InvalidRequestError(f"{what} has an object with a duplicate name.")


def _may_be_infinite(bare: bytes) -> bool:
    """Return whether there are exponents or long fractions, given the bytes outside of strings."""
    if b"E" in bare or bare.count(b"e") > bare.count(b"true") + bare.count(b"false"):
        return True
    # Integers of any length are not floats.
    return b"." in bare and _LONG_NUMBER in bare.translate(_DIGITS_AS_ZEROS)


def _out_of_range(container: object, what: str, *, is_field: bool) -> InvalidRequestError:
    pairs = container.items() if isinstance(container, dict) else ()
    names = (name for name, value in pairs if isinstance(value, float) and isinf(value))
    name = next(names, None)
    where = "" if name is None else f" for {quote(name)}"
    return InvalidRequestError(
        f"{what} has a number{where} that exceeds the range of a double.",
        param=name if is_field else None,
    )


def _outside_strings(raw: bytes) -> tuple[int, bytes]:
    """Return the number of strings, and the bytes outside of strings unless they are too many."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = raw.count(b'"') // 2
    return num_strings, b"" if num_strings > _MAX_STRINGS else b"".join(raw.split(b'"')[::2])


def _count(raw: bytes) -> tuple[int, int, int]:
    """Return the numbers of quotes, of containers and of commas."""
    # Only invalid JSON has more closing than opening brackets.
    opened = raw.count(b"[") + raw.count(b"{")
    closed = raw.count(b"]") + raw.count(b"}")
    return raw.count(b'"'), max(opened, closed), raw.count(b",")


def _check(text: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(text.format(most, count))


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
