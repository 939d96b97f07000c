"""Valid JSON for an object that a model writes, as JSON, as a Python literal, or with mistakes.

The text arrives in pieces. JSON is passed on as it is written; it is never parsed as a whole.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from math import isfinite
from typing import Literal, TypeAlias

from cluster.serving.text.text_stream import overlap

__all__ = ["MAX_DEPTH", "ObjectText"]

MAX_DEPTH = 100
"""Nested containers; a deeper container is null, since parsers limit their recursion."""
_MAX_NUMBER_LENGTH = 4300
"""The most digits that Python reads as an integer; a longer number is a string."""
_MAX_KEY_LENGTH = 256
"""Characters of a key without quotes."""
_SPACE = " \t\r\n"
_OPENING = {"{": "}", "[": "]", "(": ")"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?P<rest>(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_PYTHON_NUMBER = re.compile(r"[+-]? ?(?:0[xob][0-9a-fA-F_]+|[0-9.][0-9._]*(?:[eE][+-]?[0-9_]+)?)")
_CONSTANTS = {
    **{"true": "true", "false": "false", "null": "null"},
    **{"True": "true", "False": "false", "None": "null"},
}
_WORD = re.compile(r"[^,\]})\"'\n<\[{(]+")
_KEY = re.compile(r"[\w$@-][^\s,:=\]})\"'<\[{(]{0,255}")
_PREFIX = re.compile(r"[bBfFrRuU]{1,2}")
"""Of a string in Python."""
_PLAIN = {quote: re.compile(rf'[^"{quote}\\\x00-\x1f]+') for quote in "\"'"}
_JSON_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[\"\\/bfnrt'])")
_PYTHON_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|N\{[A-Za-z0-9 -]{1,88}\}"
    r"|[\"\\'abfnrtv\n])"
)
_OPEN_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?|[0-7]{0,2}"
    r"|N(?:\{[A-Za-z0-9 -]{0,88})?)?"
)
"""A possible beginning of a longer escape."""
_HIGH, _LOW = re.compile(r"\\u[dD][89abAB]"), re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_OPEN_LOW = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
_REPLACEMENT = "\\ufffd"

_Where: TypeAlias = Literal["key", "colon", "value", "item", "comma"]
"""The next part of the innermost container."""


@dataclass(slots=True)
class _Container:
    """An object or a list that is open."""

    end: str
    is_list: bool
    place: int
    """The index of its beginning in the written texts."""
    has_comma: bool = False


class ObjectText:
    """Reads one object, or the arguments of a Python call after its opening parenthesis.

    The text of a call is taken once it is complete.
    """

    def __init__(
        self, *, marks: tuple[str, ...] = (), is_python: bool = False, string_mark: str = ""
    ) -> None:
        """A mark outside of strings ends the object.

        `string_mark` begins and ends strings without escapes, beside quotation marks. It begins as
        no number and no key does.
        """
        self.is_closed = False
        self.is_damaged = False
        """Whether the text is neither JSON nor Python literals, so that some of it was guessed."""
        self._marks = marks
        self._mark_starts = frozenset(mark[0] for mark in marks)
        self._string_mark = string_mark
        self._is_python = is_python
        self._open: list[_Container] = []
        self._where: _Where = "value"
        self._quote = ""
        """The quotation mark that ends the string that is open."""
        self._is_raw = False
        """Whether that string has no escapes."""
        self._word = ""
        """A value without quotes that may continue."""
        self._space = ""
        """Whitespace and a comma that are written if another entry follows."""
        self._written: list[str] = []
        if is_python:
            self._begin_container("(", "{")

    @property
    def is_in_string(self) -> bool:
        """Whether a string of the object is open."""
        return bool(self._quote)

    def read_object(self, text: str, *, is_end: bool = False) -> int:
        """Read text and return how many of its characters were used.

        Unless `is_end`, the other characters are given again with the text that follows them.
        """
        at = 0
        while at < len(text) and not self.is_closed:
            read = self._read_string if self._quote else self._read_outside
            length = read(text, at, is_end)
            if not length:
                break
            at += length
        return at

    def take_text(self) -> str:
        """Return the new text of the JSON object."""
        taken = "".join(self._written)
        self._written.clear()
        return taken

    def close(self) -> None:
        """Complete an object of which the end is missing."""
        if self._quote:
            self._end_string()
        if self._word:
            self._end_word()
        while self._open:
            self._end_container()
        self.is_closed = True

    def cut(self) -> None:
        """Write a number that might have continued."""
        if self._word and _scalar(self._word.rstrip()) is not None:
            self._end_word()

    def _write(self, text: str) -> None:
        """Add text of a key or a value."""
        if len(self._open) <= MAX_DEPTH:
            self._written.append(text)

    def _write_between(self, text: str) -> None:
        """Add text between keys and values."""
        self._write(text)

    def _end_value(self) -> None:
        self._where = "comma"

    def _damage(self) -> None:
        self.is_damaged = True

    def _skip(self) -> int:
        """Leave out a character without meaning, and return its length."""
        self._damage()
        return 1

    def _read_outside(self, text: str, at: int, is_end: bool) -> int:
        character = text[at]
        if character in self._mark_starts and self._is_mark(text, at, is_end):
            return 0
        if character == self._string_mark[:1] and self._open:
            length = self._read_string_mark(text, at, is_end)
            if length is not None:
                return length
        if self._word:
            return self._read_word(text, at, is_end)
        if character.isspace():
            self._space += character if character in _SPACE else ""
            return 1
        if not self._open and character != "{":
            return self._skip()
        if character in _OPENING:
            return self._read_opening(character)
        if character in "}])":
            return self._read_closing(character)
        if character == ",":
            return self._read_comma()
        if self._where == "colon" and character in ":=":
            self._write_between(self._take_space() + (":" if character == ":" else ": "))
            self._where = "value"
            return 1
        if character in "\"'":
            return self._read_quote(text, at, is_end)
        if self._where == "key":
            return self._read_key(text, at, is_end)
        if self._where == "comma":
            return self._skip()
        found = _PREFIX.match(text, at) if self._is_python else None
        if found is not None:
            if found.end() == len(text) and not is_end:
                return 0
            if text[found.end() : found.end() + 1] in ("'", '"'):
                return self._read_prefixed(text, found, is_end)
        self._begin_entry()
        word = _WORD.match(text, at)
        self._word = character if word is None else word[0]
        return len(self._word)

    def _is_mark(self, text: str, at: int, is_end: bool) -> bool:
        """Return whether a mark or its beginning follows; a mark ends the object."""
        for mark in self._marks:
            if text.startswith(mark, at):
                self.close()
                return True
            if not is_end and mark.startswith(text[at : at + len(mark)]):
                return True
        return False

    def _begin_entry(self) -> None:
        """Write the characters before a key or a value."""
        if self._where == "comma":
            self._damage()
            self._space = f",{self._space or ' '}"
            self._open[-1].has_comma = True
            self._where = "item" if self._open[-1].is_list else "key"
        elif self._where == "colon":
            self._damage()
            self._space = f":{self._space or ' '}"
            self._where = "value"
        if self._space:
            self._write_between(self._take_space())

    def _take_space(self) -> str:
        taken, self._space = self._space, ""
        return taken

    def _read_opening(self, bracket: str) -> int:
        if self._open:
            is_key = self._where == "comma" and not self._open[-1].is_list
            if is_key or self._where == "key":
                return self._skip()
            self._begin_entry()
        self._begin_container(bracket, "[" if bracket == "(" else bracket)
        return 1

    def _begin_container(self, bracket: str, written: str) -> None:
        is_list = written == "["
        place = len(self._written)
        self._write("null" if len(self._open) == MAX_DEPTH else written)
        self._open.append(_Container(_OPENING[bracket], is_list, place))
        self._where = "item" if is_list else "key"

    def _read_closing(self, bracket: str) -> int:
        if self._is_python and bracket == "]" and len(self._open) == 1:
            # The end of the list of calls, before which a parenthesis is missing.
            self.close()
            return 0
        if all(container.end != bracket for container in self._open):
            return self._skip()
        while self._open[-1].end != bracket:
            self._damage()
            self._end_container()
        self._end_container()
        self.is_closed = not self._open
        return 1

    def _end_container(self) -> None:
        self._complete_member()
        ended = self._open[-1]
        is_group = self._is_python and ended.end == ")" and ended.is_list
        if is_group and not ended.has_comma and self._where == "comma":
            # Parentheses around a value that is no tuple.
            if len(self._open) <= MAX_DEPTH:
                self._written[ended.place] = ""
            self._space = ""
        else:
            self._write_between(self._take_space().replace(",", ""))
            self._write("]" if ended.is_list else "}")
        self._open.pop()
        self._end_value()

    def _complete_member(self) -> None:
        """Write null for a key without a value."""
        if self._where in ("colon", "value"):
            self._damage()
            if self._where == "colon":
                self._begin_entry()
            self._write("null")
            self._end_value()

    def _read_comma(self) -> int:
        self._complete_member()
        if self._where != "comma":
            self._damage()
            return 1
        self._open[-1].has_comma = True
        self._space += ","
        self._where = "item" if self._open[-1].is_list else "key"
        return 1

    def _read_key(self, text: str, at: int, is_end: bool) -> int:
        """Read a key without quotes."""
        found = _KEY.match(text, at)
        if found is None:
            return self._skip()
        if found.end() == len(text) and len(found[0]) < _MAX_KEY_LENGTH and not is_end:
            return 0
        is_keyword = self._is_python and len(self._open) == 1
        if not (is_keyword or (self._is_python and _scalar(found[0]) is not None)):
            self._damage()
        self._begin_entry()
        self._write(json.dumps(found[0], ensure_ascii=False))
        self._where = "colon"
        return len(found[0])

    def _read_word(self, text: str, at: int, is_end: bool) -> int:
        character = text[at]
        is_inside = character == ")" and all(one.end != ")" for one in self._open)
        if character in ',]}"\n)' and not is_inside:
            self._end_word()
            return 0 if self.is_closed else self._read_outside(text, at, is_end)
        found = _WORD.match(text, at)
        self._word += character if found is None else found[0]
        return 1 if found is None else len(found[0])

    def _end_word(self) -> None:
        word = self._word.rstrip()
        self._space = "".join(one for one in self._word[len(word) :] if one in _SPACE)
        self._word = ""
        written = _scalar(word)
        self._write(json.dumps(word, ensure_ascii=False) if written is None else written)
        self._end_value()
        if written is None:
            self._damage()

    def _read_prefixed(self, text: str, prefix: re.Match[str], is_end: bool) -> int:
        """Read the beginning of a string of Python that has a prefix."""
        length = self._read_quote(text, prefix.end(), is_end)
        if not length:
            return 0
        self._is_raw = prefix[0] in "rR"
        if prefix[0] not in "rRuU":
            self._damage()
        return len(prefix[0]) + length

    def _read_quote(self, text: str, at: int, is_end: bool) -> int:
        quote = text[at]
        is_triple = text.startswith(quote * 3, at)
        if not (is_triple or is_end) and (quote * 3).startswith(text[at:]):
            return 0
        if self._is_python and self._where == "comma" and self._written[-1] == '"':
            # Python joins strings that follow each other.
            self._written.pop()
            self._space = ""
            self._where = "item" if self._open[-1].is_list else "value"
        else:
            self._begin_entry()
            self._write('"')
        self._quote = quote * 3 if is_triple else quote
        self._is_raw = False
        return len(self._quote)

    def _read_string_mark(self, text: str, at: int, is_end: bool) -> int | None:
        """Read the mark that begins a string; None if another text follows."""
        mark = self._string_mark
        if not text.startswith(mark, at):
            return 0 if not is_end and mark.startswith(text[at:]) else None
        if self._word:
            self._end_word()
        self._begin_entry()
        self._write('"')
        self._quote = mark
        return len(mark)

    def _read_marked_string(self, text: str, at: int, is_end: bool) -> int:
        """Read text up to the mark that ends a string."""
        place = text.find(self._quote, at)
        if place == at:
            self._end_string()
            return len(self._string_mark)
        num_held = 0
        if place < 0:
            num_held = 0 if is_end else overlap(text[at:], self._quote)
            place = len(text) - num_held
        self._write(json.dumps(text[at:place], ensure_ascii=False)[1:-1])
        return place - at

    def _read_string(self, text: str, at: int, is_end: bool) -> int:
        if self._quote == self._string_mark:
            return self._read_marked_string(text, at, is_end)
        found = _PLAIN[self._quote[0]].match(text, at)
        if found is not None:
            self._write(found[0])
            return len(found[0])
        if text.startswith(self._quote, at):
            length = len(self._quote)
            self._end_string()
            return length
        character = text[at]
        if character == "\\":
            return self._read_escape(text, at, is_end)
        if not is_end and self._quote.startswith(text[at : at + 2]) and at + 2 >= len(text):
            return 0
        self._write("'" if character == "'" else json.dumps(character)[1:-1])
        return 1

    def _end_string(self) -> None:
        self._write('"')
        self._quote = ""
        if self._where == "key":
            self._where = "colon"
        else:
            self._end_value()

    def _read_escape(self, text: str, at: int, is_end: bool) -> int:
        if not is_end and _OPEN_ESCAPE.fullmatch(text, at):
            return 0
        if self._is_raw:
            escaped = text[at : at + 2]
            self._write(json.dumps(escaped)[1:-1])
            return len(escaped)
        found = (_PYTHON_ESCAPE if self._is_python else _JSON_ESCAPE).match(text, at)
        if found is None:
            # As in Python, a backslash that begins no escape is a character.
            self._write("\\\\")
            return 1
        escape = found[0]
        if escape[1] == "u":
            return self._read_unit(text, found, is_end)
        if escape[1] in '"\\/bfnrt':
            self._write(escape)
        elif escape[1] != "\n":
            self._write("'" if escape[1] == "'" else _decoded(escape))
        return len(escape)

    def _read_unit(self, text: str, found: re.Match[str], is_end: bool) -> int:
        """Read a unit of UTF-16, which may be a half of a character."""
        if _HIGH.match(found[0]):
            low = _LOW.match(text, found.end())
            if low is None and not is_end and _OPEN_LOW.fullmatch(text, found.end()):
                return 0
            self._write(_REPLACEMENT if low is None else found[0] + low[0])
            return len(found[0]) + (0 if low is None else len(low[0]))
        self._write(_REPLACEMENT if _LOW.match(found[0]) else found[0])
        return len(found[0])


def _scalar(word: str) -> str | None:
    """Return a number or a constant of JSON or Python as JSON."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if len(word) > _MAX_NUMBER_LENGTH:
        return None
    found = _NUMBER.fullmatch(word)
    if found is not None:
        return word if not found["rest"] or isfinite(float(word)) else None
    if _PYTHON_NUMBER.fullmatch(word) is None:
        return None
    try:
        value = ast.literal_eval(word)
        return json.dumps(value, allow_nan=False) if isinstance(value, int | float) else None
    except (SyntaxError, ValueError):
        return None


def _decoded(escape: str) -> str:
    """Return an escape of Python as the content of a JSON string."""
    try:
        character = ast.literal_eval(f'"{escape}"')
        character.encode()
    except UnicodeEncodeError:
        return _REPLACEMENT
    except SyntaxError:
        character = escape
    return json.dumps(character, ensure_ascii=False)[1:-1]
