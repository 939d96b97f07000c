"""Strings with escapes in JSON, which are parsed in steps if there are many escapes.

One call of the parser for all of them would hold the event loop for ten milliseconds.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, TypeVar

from pydantic_core import from_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.intake.steps import Steps

__all__ = ["EscapedStrings"]

Value = TypeVar("Value")

_STEP_BYTES = 2**15
_STEP_STRINGS = 2**9
_LONGEST_ESCAPE = 6
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]")


class EscapedStrings:
    """The strings of a body with escapes, taken out of it and put back after it has been parsed."""

    def __init__(self) -> None:
        # Clients cannot guess what stands for a string.
        self._mark = secrets.token_hex(16)
        self._strings: list[tuple[bytes, bytes]] = []
        """Each with its text for `_cut`."""

    def take_out(self, raw: bytes) -> Steps[bytes]:
        """Return a body in which a short string replaces each string that has escapes."""
        plain = yield from _without_escaped_quotes(raw)
        kept: list[bytes] = []
        copied = at = num_strings = 0
        while (begin := plain.find(b'"', at) + 1) and (end := plain.find(b'"', begin)) >= 0:
            if raw.find(b"\\", begin, end) >= 0:
                kept.append(
                    b"%b%b%d" % (raw[copied:begin], self._mark.encode(), len(self._strings))
                )
                self._strings.append((raw[begin:end], plain[begin:end]))
                copied = end
            at = end + 1
            num_strings += 1
            if num_strings % _STEP_STRINGS == 0:
                yield
        kept.append(raw[copied:])
        return b"".join(kept)

    def put_back(self, parsed: dict[str, object]) -> Steps[None]:
        """Parse the strings, and put each in its place. Raises ValueError for invalid JSON."""
        texts = yield from self._parsed()
        waiting: list[object] = [parsed]
        num_seen = 0
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict):
                items = [(self._restored(name, texts), value) for name, value in one.items()]
                one.clear()
                for name, value in items:
                    one[name] = self._restored(value, texts)
                    num_seen += 1
                    if num_seen % _STEP_STRINGS == 0:
                        yield
                waiting += [value for value in one.values() if isinstance(value, dict | list)]
            elif isinstance(one, list):
                for place, value in enumerate(one):
                    one[place] = self._restored(value, texts)
                    num_seen += 1
                    if num_seen % _STEP_STRINGS == 0:
                        yield
                waiting += [value for value in one if isinstance(value, dict | list)]

    def _restored(self, value: Value, texts: Mapping[str, str]) -> Value | str:
        return texts.get(value, value) if isinstance(value, str) else value

    def _parsed(self) -> Steps[dict[str, str]]:
        """Return the texts by what stands for them."""
        texts: list[str] = []
        pending: list[bytes] = []
        num_bytes = 0
        for raw, plain in self._strings:
            if len(raw) > _STEP_BYTES:
                texts += from_json(b'["%b"]' % b'","'.join(pending)) if pending else []
                pending, num_bytes = [], 0
                yield
                texts.append((yield from _parsed_in_pieces(raw, plain)))
                continue
            pending.append(raw)
            num_bytes += len(raw)
            if num_bytes >= _STEP_BYTES:
                texts += from_json(b'["%b"]' % b'","'.join(pending))
                pending, num_bytes = [], 0
                yield
        texts += from_json(b'["%b"]' % b'","'.join(pending)) if pending else []
        yield
        return {f"{self._mark}{index}": text for index, text in enumerate(texts)}


def _without_escaped_quotes(raw: bytes) -> Steps[bytes]:
    """Return the bytes with zeros for escaped quotes and backslashes, in the same places."""
    pieces: list[bytes] = []
    at = 0
    while at < len(raw):
        piece = raw[at : at + _STEP_BYTES]
        if at + len(piece) < len(raw) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # The last one begins an escape.
            piece = piece[:-1]
        at += len(piece)
        pieces.append(piece.replace(rb"\\", b"\0\0").replace(rb"\"", b"\0\0"))
        yield
    return b"".join(pieces)


def _parsed_in_pieces(raw: bytes, plain: bytes) -> Steps[str]:
    """Return the text of a long string, given what `_without_escaped_quotes` made of it."""
    texts: list[str] = []
    at = 0
    while at < len(raw):
        end = _cut(raw, plain, at, at + _STEP_BYTES)
        texts.append(from_json(b'"%b"' % raw[at:end]))
        at = end
        yield
    return "".join(texts)


def _cut(raw: bytes, plain: bytes, begin: int, end: int) -> int:
    """Return where a piece of a string ends that is at most `end` and cuts no character."""
    if end >= len(raw):
        return len(raw)
    while raw[end] & 0xC0 == 0x80:
        # Inside of UTF-8.
        end -= 1
        if end <= begin:
            raise ValueError("a string is not valid UTF-8")
    zeros = len(plain[begin:end]) - len(plain[begin:end].rstrip(b"\0"))
    escape = plain.rfind(b"\\", end - _LONGEST_ESCAPE + 1, end)
    if zeros % 2:
        end -= 1
    elif escape >= 0 and (plain[escape + 1 : escape + 2] == b"u" or escape == end - 1):
        end = escape
    if _LOW_SURROGATE.match(raw, end) and _HIGH_SURROGATE.match(raw, end - _LONGEST_ESCAPE):
        end -= _LONGEST_ESCAPE
    return end
