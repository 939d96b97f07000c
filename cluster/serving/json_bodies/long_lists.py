"""Long lists of numbers in JSON, such as token ids, which are parsed in steps.

One call of the parser for all of them would hold the event loop for tens of milliseconds.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pydantic_core import from_json

if TYPE_CHECKING:
    from cluster.serving.intake.steps import Steps

__all__ = ["LongLists"]

_LONG = 2**3
"""Commas of a list from which on it is parsed by itself."""
_SHORT_BYTES = 2**10
"""What is between two strings is not searched for lists if it is shorter."""
_STEP_BYTES = 2**15


class LongLists:
    """The long lists of a body, taken out of it and put back after it has been parsed."""

    def __init__(self) -> None:
        # Clients cannot guess what stands for a list.
        self._mark = secrets.token_hex(16)
        self._lists: list[bytes] = []

    def take_out(self, raw: bytes) -> Steps[bytes]:
        """Return a body without escaped quotes, in which a string replaces each list."""
        # Every second part is a string.
        parts = raw.split(b'"')
        for index in range(0, len(parts), 2):
            if len(parts[index]) > _SHORT_BYTES:
                parts[index] = self._without_lists(parts[index])
                yield
        return b'"'.join(parts)

    def put_back(self, parsed: dict[str, object]) -> Steps[None]:
        """Parse the lists, and put each in its place. Raises ValueError for invalid JSON."""
        if not self._lists:
            return
        numbers: dict[int, list[object]] = {}
        for index, raw in enumerate(self._lists):
            numbers[index] = yield from _parsed(raw)
        waiting: list[dict[str, object] | list[object]] = [parsed]
        while waiting:
            one = waiting.pop()
            if isinstance(one, list) and len(one) == 1 and self._is_mark(one[0]):
                one[:] = numbers[int(str(one[0])[len(self._mark) :])]
                continue
            values = one.values() if isinstance(one, dict) else one
            waiting += [value for value in values if isinstance(value, dict | list)]

    def _without_lists(self, part: bytes) -> bytes:
        pieces = part.split(b"]")
        for index, piece in enumerate(pieces[:-1]):
            before, bracket, inside = piece.rpartition(b"[")
            if bracket and inside.count(b",") >= _LONG and b"{" not in inside:
                mark = f"{self._mark}{len(self._lists)}".encode()
                self._lists.append(inside)
                pieces[index] = b'%b["%b"' % (before, mark)
        return b"]".join(pieces)

    def _is_mark(self, value: object) -> bool:
        return isinstance(value, str) and value.startswith(self._mark)


def _parsed(raw: bytes) -> Steps[list[object]]:
    found: list[object] = []
    at = 0
    while at <= len(raw):
        end = raw.find(b",", at + _STEP_BYTES)
        end = len(raw) if end < 0 else end
        part = from_json(b"[%b]" % raw[at:end], allow_inf_nan=False)
        if not part:
            raise ValueError("a list has a trailing comma")
        found += part
        at = end + 1
        yield
    return found
