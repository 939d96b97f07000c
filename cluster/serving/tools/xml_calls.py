"""Readers of tool calls with elements as arguments, as Qwen3-Coder and GLM write them.

Models leave marks out. Every mark that cannot be a part of a value ends the value, and every mark
behind an argument ends the call.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, ClassVar, Literal

from cluster.serving.tools.object_text import MAX_DEPTH, ObjectText
from cluster.serving.tools.turn_reader import TurnReader
from cluster.structured.grammar.call_arguments import read_value
from cluster.structured.grammar.schema_keywords import kinds_of, types_of_value

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import ToolSchemas

__all__ = ["GlmReader", "QwenCoderReader"]

_BEGIN = "<tool_call>"
_END = "</tool_call>"
_FUNCTION_BEGIN = "<function="
_FUNCTION_END = "</function>"
_MAX_HEAD_LENGTH = 512
"""Characters of a name or a key with its marks."""
_MAX_LITERAL_LENGTH = 2**15
"""Characters of a literal of Python; reading longer literals would block the event loop."""
_Answer = bool | None
"""None if more text is needed."""


class _ElementsReader(TurnReader):
    """Writes arguments as JSON: strings as they come, other values when they are complete."""

    _begins: ClassVar[tuple[str, ...]]
    """The marks of which each may begin a call."""
    _call_ends: ClassVar[tuple[str, ...]]
    """The marks that end a call."""
    _key_begin: ClassVar[str]
    _key_end: ClassVar[str]
    _value_end: ClassVar[str]
    _other_marks: ClassVar[tuple[str, ...]] = ()
    _has_lines: ClassVar[bool]
    """Whether a line feed precedes and follows a value."""

    _where: Literal["content", "name", "between", "value"] = "content"
    _is_open = False
    """Whether the last mark of a call is missing."""

    def __init__(self, tools: ToolSchemas, *, is_parallel: bool, has_short_ids: bool) -> None:
        super().__init__(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._schema: Mapping[str, object] = {}
        self._properties: Mapping[str, object] = {}
        self._keys: set[str] = set()
        """The keys of the arguments so far."""
        self._is_string = False
        self._is_value_new = True
        self._has_text = False
        """Whether some of the value was written."""
        self._kinds: Set[str] = frozenset()
        """The types of the value that is being read; empty if its schema does not specify them."""
        self._stray = ""
        """Text inside of a call that is no part of it, and becomes content behind it."""

    @abstractmethod
    def _name(self, *, is_last: bool) -> re.Match[str] | None:
        """Match the name of the tool at the beginning of the buffer."""

    @abstractmethod
    def _may_be_name(self) -> bool:
        """Return whether the buffer may be the beginning of a name."""

    @abstractmethod
    def _key(self) -> re.Match[str] | None:
        """Match the key of an argument at the beginning of the buffer."""

    @abstractmethod
    def _ends_value(self, place: int, *, is_end: bool) -> _Answer:
        """Return whether a mark other than its end mark ends the value, given where it is."""

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                marks = (*self._begins, _END) if self._is_open else self._begins
                found = self._write_until(*marks, is_end=is_end)
                if found in self._begins:
                    self._head, self._where = found, "name"
                self._is_open = self._is_open and found != _END
                return bool(found)
            case "name":
                return self._step_name(is_end=is_end)
            case "between":
                return self._step_between(is_end=is_end)
            case "value":
                return self._step_value(is_end=is_end)

    def _step_name(self, *, is_end: bool) -> bool:
        begun = self._buffer.lstrip()
        if self._head == _BEGIN and begun.startswith(_BEGIN):
            self._buffer = begun[len(_BEGIN) :]
            return True
        found = self._name(is_last=is_end and not self._is_cut_off)
        if found is None:
            is_short = len(self._buffer) < _MAX_HEAD_LENGTH
            if is_short and not is_end and (self._may_be_name() or _BEGIN.startswith(begun)):
                return False
        elif found[1] in self._tools:
            self._take(found.end())
            self._begin_call(found[1])
            self._schema = self._tools[found[1]]
            properties = self._schema.get("properties")
            self._properties = properties if isinstance(properties, Mapping) else {}
            self._keys = set()
            self._where = "between"
            return True
        self._where = "content"
        self._write_head()
        return bool(self._buffer)

    def _step_between(self, *, is_end: bool) -> bool:
        begun = self._buffer.lstrip()
        space = self._take(len(self._buffer) - len(begun))
        self._stray += space if self._stray else ""
        for mark in self._call_ends:
            if self._buffer.startswith(mark):
                self._take(len(mark))
                self._end_call(is_open=mark != _END)
                return True
        if self._buffer.startswith(self._begins):
            # The marks that end a call are missing.
            self._end_call(is_open=False)
            return True
        found = self._key()
        if found is not None:
            self._take(found.end())
            is_known = found[1] in self._properties
            self._begin_value(found[1] if is_known else found[1].strip())
            return True
        if is_end and not self._buffer:
            if not self._is_cut_off:
                self._end_call(is_open=False)
            return False
        marks = (*self._begins, *self._call_ends, *self._other_marks, self._value_end)
        for mark in self._other_marks:
            if self._buffer.startswith(mark):
                self._take(len(mark))
                return True
        may_be_key = self._buffer.startswith(self._key_begin) and self._key_end not in self._buffer
        may_be_mark = any(mark.startswith(self._buffer) for mark in (*marks, self._key_begin))
        if (may_be_key or may_be_mark) and len(self._buffer) < _MAX_HEAD_LENGTH and not is_end:
            return False
        next_mark = self._buffer.find("<", 1)
        self._stray += self._take(len(self._buffer) if next_mark < 0 else next_mark)
        return True

    def _end_call(self, *, is_open: bool) -> None:
        self._write_arguments("}" if self._keys else "{}")
        self._is_open = is_open
        self._where = "content"
        stray, self._stray = self._stray, ""
        self._write(stray)

    def _begin_value(self, key: str) -> None:
        self._kinds = kinds_of(self._properties.get(key), self._schema)
        self._is_string = self._kinds == {"string"}
        self._is_value_new, self._has_text = True, False
        comma = ", " if self._keys else "{"
        self._keys.add(key)
        quote = '"' if self._is_string else ""
        self._write_arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {quote}")
        self._where = "value"

    def _step_value(self, *, is_end: bool) -> bool:
        if self._is_value_new and self._has_lines:
            if not self._buffer and not is_end:
                return False
            self._buffer = self._buffer.removeprefix("\n")
        self._is_value_new = False
        length, is_ended = self._value_length(is_end=is_end)
        if is_end and not is_ended and not self._is_cut_off:
            length, is_ended = len(self._buffer), True
        if is_ended:
            value = self._take(length)
            self._buffer = self._buffer.removeprefix(self._value_end)
            value = value.removesuffix("\n") if self._has_lines else value
            self._write_arguments(
                f'{_escaped(value)}"' if self._is_string else self._json_of(value)
            )
            self._where = "between"
            return True
        if self._is_string:
            if self._has_lines and not is_end and self._buffer[:length].endswith("\n"):
                length -= 1
            self._has_text = self._has_text or length > 0
            self._write_arguments(_escaped(self._take(length)))
        return False

    def _value_length(self, *, is_end: bool) -> tuple[int, bool]:
        """Return the length of the value as far as it is certain, and whether it has ended."""
        place = self._buffer.find("<")
        while place >= 0:
            if self._buffer.startswith(self._value_end, place):
                return place, True
            answer: _Answer = None
            if not self._value_end.startswith(self._buffer[place:]):
                answer = not self.has_grammar and self._ends_value(place, is_end=is_end)
            if answer or (answer is None and not is_end):
                return place, bool(answer)
            place = self._buffer.find("<", place + 1)
        return len(self._buffer), False

    def _json_of(self, text: str) -> str:
        """Return the JSON of a value; a text that is not of an allowed type is a string."""
        kinds = self._kinds
        value = read_value(text, kinds)
        if isinstance(value, str) and not self.has_grammar:
            # Some models write the literal of a container as a string.
            inner = text if "string" in kinds else value
            value = _literal_value(text, kinds, default=_literal_value(inner, kinds, default=value))
        written = json.dumps(value, ensure_ascii=False)
        # Halves of characters are replaced.
        written = written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if written.count("[") + written.count("{") <= MAX_DEPTH or isinstance(value, str):
            return written
        container = ObjectText()
        container.read_object(f'{{"":{written}}}', is_end=True)
        return container.take_text().removeprefix('{"":').removesuffix("}")


class QwenCoderReader(_ElementsReader):
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` within `<tool_call>`."""

    _begins = (_BEGIN, _FUNCTION_BEGIN)
    _call_ends = (_FUNCTION_END, _END)
    _key_begin = "<parameter="
    _key_end = ">"
    _value_end = "</parameter>"
    _other_marks = (_value_end,)
    _has_lines = True

    def _name(self, *, is_last: bool) -> re.Match[str] | None:
        begin = rf"\s*{_FUNCTION_BEGIN}" if self._head == _BEGIN else ""
        return re.match(rf"{begin}([^>\n]+)>", self._buffer)

    def _may_be_name(self) -> bool:
        begun = self._buffer.lstrip()
        if self._head == _BEGIN and not begun.startswith(_FUNCTION_BEGIN):
            return _FUNCTION_BEGIN.startswith(begun)
        return ">" not in begun and "\n" not in begun

    def _key(self) -> re.Match[str] | None:
        return re.match(r"<parameter=([^>\n]+)>", self._buffer)

    def _ends_value(self, place: int, *, is_end: bool) -> _Answer:
        rest = self._buffer[place : place + _MAX_HEAD_LENGTH]
        marks = (*self._begins, *self._call_ends, self._key_begin)
        if any(mark.startswith(rest) and mark != rest for mark in marks):
            return None
        if rest.startswith(_END):
            return True
        is_line = self._buffer[place - 1] == "\n" if place else not self._has_text
        if rest.startswith(self._key_begin):
            key, end, _ = rest.removeprefix(self._key_begin).partition(self._key_end)
            if not end:
                return False if "\n" in key or len(rest) == _MAX_HEAD_LENGTH else None
            is_known = key in self._properties or (is_line and not self._properties)
            return is_known and key not in self._keys
        if rest.startswith(_FUNCTION_END):
            after = rest.removeprefix(_FUNCTION_END).lstrip()
            if after.startswith((*self._begins, _END)) or (is_end and not after):
                return True
            return None if any(one.startswith(after) for one in (*self._begins, _END)) else False
        has_begin = rest.startswith(_BEGIN)
        found = re.match(rf"(?:{_BEGIN})?\s*{_FUNCTION_BEGIN}([^>\n]*)(>?)", rest)
        if found is None or not (has_begin or is_line):
            after = rest.removeprefix(_BEGIN).lstrip()
            return None if has_begin and _FUNCTION_BEGIN.startswith(after) else False
        if not found[2] and found.end() == len(rest) < _MAX_HEAD_LENGTH:
            return None
        return bool(found[2]) and found[1] in self._tools


class GlmReader(_ElementsReader):
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` within `<tool_call>`."""

    _begins = (_BEGIN,)
    _call_ends = (_END,)
    _key_begin = "<arg_key>"
    _key_end = "<arg_value>"
    _value_end = "</arg_value>"
    _other_marks = (_value_end, "</arg_key>")
    _has_lines = False

    def _name(self, *, is_last: bool) -> re.Match[str] | None:
        return re.match(rf"\s*([^\s<]+)\s*(?:(?=<){'|$' if is_last else ''})", self._buffer)

    def _may_be_name(self) -> bool:
        return re.fullmatch(r"\s*[^\s<]*\s*", self._buffer) is not None

    def _key(self) -> re.Match[str] | None:
        # The mark before the key's value may be missing, too.
        pattern = r"<arg_key>([^<]*)(?:</arg_key>\s*(?:<arg_value>|(?=[^<\s]))|<arg_value>)"
        return re.match(pattern, self._buffer)

    def _ends_value(self, place: int, *, is_end: bool) -> _Answer:
        rest = self._buffer[place : place + _MAX_HEAD_LENGTH]
        if rest.startswith((self._key_begin, _END)):
            return True
        if not rest.startswith(_BEGIN):
            marks = (_BEGIN, _END, self._key_begin)
            return None if any(mark.startswith(rest) for mark in marks) else False
        name = rest.removeprefix(_BEGIN).lstrip()
        word = re.split(r"[\s<]", name, maxsplit=1)[0]
        return None if word == name else word in self._tools


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _literal_value(text: str, kinds: Set[str], *, default: object) -> object:
    """Return the value of a literal of Python if a value of its type is allowed."""
    literal = f"value=[{text.strip()}\n])"
    reader = ObjectText(is_python=True)
    if len(text) > _MAX_LITERAL_LENGTH or reader.read_object(literal, is_end=True) < len(literal):
        return default
    items: list[object] = json.loads(reader.take_text())["value"] if reader.is_closed else []
    if reader.is_damaged or len(items) != 1:
        return default
    (value,) = items
    if not kinds:
        return value if isinstance(value, dict | list) else default
    is_allowed = not types_of_value(value).isdisjoint(kinds - {"string"})
    return value if is_allowed or (value is None and "string" not in kinds) else default
