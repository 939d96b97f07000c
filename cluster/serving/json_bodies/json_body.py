"""JSON bodies as Python objects, within limits that the event loop can afford.

Parsing costs time per object rather than per byte and blocks the event loop, so objects are
counted before they are made.
"""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING

from pydantic_core import from_json

from cluster.serving.intake.limits import LARGEST, RequestSize
from cluster.serving.json_bodies.escaped_strings import EscapedStrings
from cluster.serving.json_bodies.long_lists import LongLists
from pagedray.errors import ContextLengthError, InvalidRequestError
from pagedray.wording.shown_value import shown_value

if TYPE_CHECKING:
    from cluster.serving.intake.steps import Steps

__all__ = ["check_counts", "read_json"]

_MAX_CONTAINERS = 2**13
_MAX_STRINGS = 2**15
_ESCAPES_AT_ONCE = 2**15
"""Backslashes of a body that the parser is given in one call."""
_VALUES_AT_ONCE = 2**16
"""Values that the parser is given in one call."""
_STEP_VALUES = 2**12
"""Values that are searched for objects at once."""
_STEP_BYTES = 2**18
"""Bytes that are counted at once, in less than a millisecond regardless of their contents."""
_STEP_TEXT_BYTES = 2**16
"""Bytes that are searched for strings at once."""
_ONE_BRACKET = bytes.maketrans(b"[{}", b"]]]")
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 309
"""Without an exponent, numbers of fewer digits are in the range of a double."""


def read_json(
    raw: bytes, size: RequestSize = LARGEST, *, what: str = "The body"
) -> Steps[dict[str, object]]:
    """Return the JSON object that `raw` is. Raises InvalidRequestError, naming `what`.

    Duplicate names in an object are rejected, because a proxy might read the other value, and so
    are numbers that would be read as infinite.
    """
    yield from check_counts(raw, what, size)
    strings = None
    if raw.count(b"\\") > _ESCAPES_AT_ONCE:
        yield
        strings = EscapedStrings()
        raw = yield from strings.take_out(raw)
    lists = None
    if raw.count(b",") > _VALUES_AT_ONCE:
        yield
        lists = LongLists()
        raw = yield from _without_lists(raw, lists, what)
    yield
    try:
        parsed = from_json(raw, allow_inf_nan=False)
        if lists is not None and isinstance(parsed, dict):
            yield from lists.put_back(parsed)
        if strings is not None and isinstance(parsed, dict):
            yield from strings.put_back(parsed)
    except ValueError as error:
        raise InvalidRequestError(f"{what} is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{what} must be a JSON object.")
    yield
    yield from _check_values(raw, parsed, what)
    return parsed


def _without_lists(raw: bytes, lists: LongLists, what: str) -> Steps[bytes]:
    """Return the body without its long lists. Raises InvalidRequestError for other long ones."""
    if b'\\"' not in raw:
        raw = yield from lists.take_out(raw)
        yield
    _, bare = yield from _outside_strings(raw)
    num_commas = bare.count(b",")
    text = f"{what} may have at most {{}} values outside of long lists of numbers, not {{}}."
    _check(text, num_commas, _VALUES_AT_ONCE)
    return raw


def check_counts(raw: bytes, what: str, size: RequestSize = LARGEST) -> Steps[None]:
    """Raise InvalidRequestError, naming `what`, if there are too many objects to parse."""
    quotes, containers, commas = yield from _count(raw)
    num_fewest = min(size.num_list_values, size.num_values)
    if quotes <= 2 * _MAX_STRINGS and containers <= _MAX_CONTAINERS and commas <= num_fewest:
        return
    yield
    # Quotes, brackets and commas inside strings made the count too high.
    num_strings, bare = yield from _outside_strings(raw)
    _check(f"{what} may have at most {{}} strings, not {{}}.", num_strings, _MAX_STRINGS)
    _, num_containers, num_commas = yield from _count(bare)
    _check(
        f"{what} may have at most {{}} arrays and objects, not {{}}.",
        num_containers,
        _MAX_CONTAINERS,
    )
    yield
    if num_commas > num_fewest:
        yield from _check_entries(bare, what, size)
    _check(f"{what} may have at most {{}} values, not {{}}.", num_commas, size.num_values)


def _check_entries(bare: bytes, what: str, size: RequestSize) -> Steps[None]:
    """Raise ContextLengthError for a list that no context of the model holds."""
    num_entries = yield from _num_longest(bare)
    if num_entries > size.num_list_values:
        raise ContextLengthError(
            f"{what} has a list or an object of {num_entries} entries, but the context length of "
            f"{size.context} (--max-model-len) allows at most {size.num_list_values}."
        )


def _num_longest(bare: bytes) -> Steps[int]:
    """Return the most entries that are between two brackets."""
    most = num_commas = 0
    for at in range(0, len(bare), _STEP_BYTES):
        parts = bare[at : at + _STEP_BYTES].translate(_ONE_BRACKET).split(b"]")
        # The first part continues the last one before it.
        counts = [num_commas + parts[0].count(b","), *(part.count(b",") for part in parts[1:])]
        most = max(most, *counts)
        num_commas = counts[-1]
        yield
    return most + 1


def _check_values(raw: bytes, parsed: dict[str, object], what: str) -> Steps[None]:
    """Raise InvalidRequestError for a duplicate name, or a number that was read as infinite."""
    # Each name is followed by a colon, but of duplicates only one was kept.
    _, bare = yield from _outside_strings(raw)
    num_left = bare.count(b":")
    num_objects = bare.count(b"{")
    may_be_infinite = _may_be_infinite(bare)
    waiting: list[object] = [parsed]
    num_seen = 0
    while waiting and (num_objects or may_be_infinite):
        one = waiting.pop()
        values = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        if isinstance(one, dict):
            num_objects -= 1
            num_left -= len(one)
        for value in values:
            num_seen += 1
            if num_seen % _STEP_VALUES == 0:
                yield
            if isinstance(value, dict | list):
                waiting.append(value)
            elif isinstance(value, float) and isinf(value):
                raise _out_of_range(one, what, is_field=one is parsed)
    if num_left:
        raise InvalidRequestError(f"{what} has an object with a duplicate name.")


def _may_be_infinite(bare: bytes) -> bool:
    """Return whether there are exponents or long fractions, given what is outside of strings."""
    if b"E" in bare or bare.count(b"e") > bare.count(b"true") + bare.count(b"false"):
        return True
    # Integers of any length are not floats.
    return b"." in bare and _LONG_NUMBER in bare.translate(_DIGITS_AS_ZEROS)


def _out_of_range(container: object, what: str, *, is_field: bool) -> InvalidRequestError:
    pairs = container.items() if isinstance(container, dict) else ()
    names = (name for name, value in pairs if isinstance(value, float) and isinf(value))
    name = next(names, None)
    where = "" if name is None else f" for {shown_value(name)}"
    return InvalidRequestError(
        f"{what} has a number{where} that exceeds the range of a double.",
        param=name if is_field else None,
    )


def _outside_strings(raw: bytes) -> Steps[tuple[int, bytes]]:
    """Return the number of strings, and what is outside of them unless they are too many."""
    outside: list[bytes] = []
    at = num_quotes = 0
    while at < len(raw):
        part = raw[at : at + _STEP_TEXT_BYTES]
        at += len(part)
        if at < len(raw) and (len(part) - len(part.rstrip(b"\\"))) % 2:
            # The last one begins an escape.
            part = part[:-1]
            at -= 1
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        if num_quotes <= 2 * _MAX_STRINGS:
            outside.append(b"".join(pieces[num_quotes % 2 :: 2]))
        num_quotes += len(pieces) - 1
        yield
    return num_quotes // 2, b"".join(outside)


def _count(raw: bytes) -> Steps[tuple[int, int, int]]:
    """Return the numbers of quotes, of containers and of commas."""
    quotes = opened = closed = commas = 0
    for at in range(0, len(raw), _STEP_BYTES):
        end = at + _STEP_BYTES
        quotes += raw.count(b'"', at, end)
        opened += raw.count(b"[", at, end) + raw.count(b"{", at, end)
        closed += raw.count(b"]", at, end) + raw.count(b"}", at, end)
        commas += raw.count(b",", at, end)
        if end < len(raw):
            yield
    # Only invalid JSON has more that are closed.
    return quotes, max(opened, closed), commas


def _check(text: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(text.format(most, count))
