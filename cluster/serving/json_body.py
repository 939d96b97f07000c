"""JSON bodies as Python objects, within limits that the event loop can afford.

Parsing costs time per object rather than per byte and blocks the event loop, so objects are
counted before they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic_core import from_json

from cluster.serving.intake.limits import LARGEST, RequestSize
from cluster.serving.long_lists import LongLists
from pagedray.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from cluster.serving.intake.steps import Steps

__all__ = ["check_counts", "read_json"]

_MAX_CONTAINERS = 2**13
_MAX_STRINGS = 2**15
_VALUES_AT_ONCE = 2**16
"""Values that the parser is given in one call."""
_STEP_OBJECTS = 2**10
_ONE_BRACKET = bytes.maketrans(b"[{}", b"]]]")


def read_json(raw: bytes, size: RequestSize = LARGEST) -> Steps[dict[str, object]]:
    """Return the JSON object of a body. Raises InvalidRequestError.

    Duplicate names in an object are rejected, because a proxy might read the other value.
    """
    yield from check_counts(raw, "The body", size)
    lists = None
    if raw.count(b",") > _VALUES_AT_ONCE:
        yield
        lists = LongLists()
        raw = yield from _without_lists(raw, lists)
    yield
    try:
        parsed = from_json(raw, allow_inf_nan=False)
        if lists is not None and isinstance(parsed, dict):
            yield from lists.put_back(parsed)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    yield
    yield from _check_names(raw, parsed)
    return parsed


def _without_lists(raw: bytes, lists: LongLists) -> Steps[bytes]:
    """Return the body without its long lists. Raises InvalidRequestError for other long ones."""
    if b'\\"' not in raw:
        raw = yield from lists.take_out(raw)
        yield
    num_commas = _between_strings(_unescaped(raw)).count(b",")
    text = "The body may have at most {} values outside of long lists of numbers, not {}."
    _check(text, num_commas, _VALUES_AT_ONCE)
    return raw


def check_counts(raw: bytes, what: str, size: RequestSize = LARGEST) -> Steps[None]:
    """Raise InvalidRequestError, naming `what`, if there are too many objects to parse."""
    quotes, containers, commas = _count(raw)
    num_fewest = min(size.num_list_values, size.num_values)
    if quotes <= 2 * _MAX_STRINGS and containers <= _MAX_CONTAINERS and commas <= num_fewest:
        return
    yield
    # Quotes, brackets and commas inside strings made the count too high.
    unescaped = _unescaped(raw)
    num_strings = unescaped.count(b'"') // 2
    _check(f"{what} may have at most {{}} strings, not {{}}.", num_strings, _MAX_STRINGS)
    bare = _between_strings(unescaped)
    yield
    _, num_containers, num_commas = _count(bare)
    _check(
        f"{what} may have at most {{}} arrays and objects, not {{}}.",
        num_containers,
        _MAX_CONTAINERS,
    )
    yield
    if num_commas > num_fewest:
        _check_entries(bare, what, size)
    _check(f"{what} may have at most {{}} values, not {{}}.", num_commas, size.num_values)


def _check_entries(bare: bytes, what: str, size: RequestSize) -> None:
    """Raise ContextLengthError for a list that no context of the model holds."""
    parts = bare.translate(_ONE_BRACKET).split(b"]")
    longest = max(part.count(b",") for part in parts) + 1
    if longest > size.num_list_values:
        raise ContextLengthError(
            f"{what} has a list or an object of {longest} entries, but the context length of "
            f"{size.context} (--max-model-len) allows at most {size.num_list_values}."
        )


def _check_names(raw: bytes, parsed: dict[str, object]) -> Steps[None]:
    # Each name is followed by a colon, but of duplicates only one was kept.
    bare = _between_strings(_unescaped(raw))
    num_left = bare.count(b":")
    num_objects = bare.count(b"{")
    waiting: list[object] = [parsed]
    while waiting and num_objects:
        one = waiting.pop()
        if isinstance(one, dict):
            num_objects -= 1
            if num_objects % _STEP_OBJECTS == 0:
                yield
            num_left -= len(one)
            waiting += [value for value in one.values() if isinstance(value, dict | list)]
        elif isinstance(one, list):
            waiting += [value for value in one if isinstance(value, dict | list)]
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
