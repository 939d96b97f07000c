"""Readers of tool calls whose arguments are elements, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, ClassVar, Literal

from cluster.serving.text.marks import overlap
from cluster.serving.tools.turn_reader import TurnReader
from cluster.structured.grammar.calls.element_values import read_value
from cluster.structured.grammar.schemas.schema_values import kinds_of

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import ToolSchemas

__all__ = ["GlmReader", "QwenCoderReader"]

_BEGIN = "<tool_call>"
_MAX_HEAD_LENGTH = 512
"""Characters of a name or a key with its marks."""


class _ElementsReader(TurnReader):
    """Writes arguments as JSON: strings as they come, other values when they are complete."""

    _call_end: ClassVar[str]
    _key_begin: ClassVar[str]
    _key_end: ClassVar[str]
    _value_end: ClassVar[str]
    _has_lines: ClassVar[bool]
    """Whether a line feed precedes and follows a value."""

    _end: ClassVar[str]
    """What follows the end of a call; empty for nothing."""

    _where: Literal["content", "name", "between", "value", "end"] = "content"

    def __init__(self, tools: ToolSchemas, *, is_parallel: bool, has_short_ids: bool) -> None:
        super().__init__(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._schema: Mapping[str, object] = {}
        self._properties: Mapping[str, object] = {}
        self._has_arguments = False
        self._is_string = False
        self._is_value_new = True
        self._kinds: Set[str] = frozenset()
        """The types of the value that is being read; empty if its schema does not specify them."""

    @abstractmethod
    def _name(self) -> re.Match[str] | None:
        """Match the name of the tool at the beginning of the buffer."""

    @abstractmethod
    def _may_be_name(self) -> bool:
        """Return whether the buffer may be the beginning of a name."""

    @abstractmethod
    def _key(self) -> re.Match[str] | None:
        """Match the key of an argument at the beginning of the buffer."""

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                if not self._write_until(_BEGIN, is_end=is_end):
                    return False
                self._where = "name"
                return True
            case "name":
                return self._step_name(is_end=is_end)
            case "between":
                return self._step_between()
            case "value":
                return self._step_value(is_end=is_end)
            case "end":
                # As with other formats, text between a call and its end mark is dropped.
                before, mark, after = self._buffer.partition(self._end)
                self._buffer = after if mark else before[len(before) - overlap(before, self._end) :]
                self._where = "content" if mark else "end"
                return bool(mark)

    def _step_name(self, *, is_end: bool) -> bool:
        found = self._name()
        if found is None:
            is_short = len(self._buffer) < _MAX_HEAD_LENGTH
            if is_short and self._may_be_name() and not is_end:
                return False
        elif found[1] in self._tools:
            self._take(found.end())
            self._begin_call(found[1])
            self._schema = self._tools[found[1]]
            properties = self._schema.get("properties")
            self._properties = properties if isinstance(properties, Mapping) else {}
            self._has_arguments = False
            self._where = "between"
            return True
        self._write(_BEGIN)
        self._where = "content"
        return True

    def _step_between(self) -> bool:
        self._take_space()
        if self._buffer.startswith(self._call_end):
            self._take(len(self._call_end))
            self._write_arguments("}" if self._has_arguments else "{}")
            self._where = "end" if self._end else "content"
            return True
        found = self._key()
        if found is not None:
            self._take(found.end())
            self._begin_value(found[1])
            return True
        begun = self._buffer[:_MAX_HEAD_LENGTH]
        may_be_key = self._key_begin.startswith(begun) or (
            begun.startswith(self._key_begin) and self._key_end not in begun
        )
        if len(begun) < _MAX_HEAD_LENGTH and (self._call_end.startswith(begun) or may_be_key):
            return False
        # Text between elements is neither content nor an argument.
        next_mark = self._buffer.find("<", 1)
        self._take(len(self._buffer) if next_mark < 0 else next_mark)
        return bool(self._buffer)

    def _begin_value(self, key: str) -> None:
        self._kinds = kinds_of(self._properties.get(key), self._schema)
        self._is_string = self._kinds == {"string"}
        self._is_value_new = True
        comma = ", " if self._has_arguments else "{"
        self._has_arguments = True
        quote = '"' if self._is_string else ""
        self._write_arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {quote}")
        self._where = "value"

    def _step_value(self, *, is_end: bool) -> bool:
        if self._is_value_new and self._has_lines:
            if not self._buffer:
                return False
            self._buffer = self._buffer.removeprefix("\n")
        self._is_value_new = False
        value, mark, after = self._buffer.partition(self._value_end)
        if mark:
            self._buffer = after
            value = value.removesuffix("\n") if self._has_lines else value
            self._write_arguments(
                f'{_escaped(value)}"' if self._is_string else _json_of(value, self._kinds)
            )
            self._where = "between"
            return True
        if self._is_string:
            mark = f"\n{self._value_end}" if self._has_lines else self._value_end
            num_held = max(overlap(self._buffer, mark), overlap(self._buffer, self._value_end))
            length = len(self._buffer) if is_end else len(self._buffer) - num_held
            self._write_arguments(_escaped(self._take(length)))
        return False


class QwenCoderReader(_ElementsReader):
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` within `<tool_call>`."""

    _call_end = "</function>"
    _end = "</tool_call>"
    _key_begin = "<parameter="
    _key_end = ">"
    _value_end = "</parameter>"
    _has_lines = True

    def _name(self) -> re.Match[str] | None:
        return re.match(r"\s*<function=([^>\n]+)>", self._buffer)

    def _may_be_name(self) -> bool:
        begun = self._buffer.lstrip()
        return begun.startswith("<function=") or "<function=".startswith(begun)

    def _key(self) -> re.Match[str] | None:
        return re.match(r"<parameter=([^>\n]+)>", self._buffer)


class GlmReader(_ElementsReader):
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` within `<tool_call>`."""

    _call_end = "</tool_call>"
    _end = ""
    _key_begin = "<arg_key>"
    _key_end = "<arg_value>"
    _value_end = "</arg_value>"
    _has_lines = False

    def _name(self) -> re.Match[str] | None:
        return re.match(r"\s*([^\s<]+)\s*(?=<)", self._buffer)

    def _may_be_name(self) -> bool:
        return re.fullmatch(r"\s*[^\s<]*\s*", self._buffer) is not None

    def _key(self) -> re.Match[str] | None:
        return re.match(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>", self._buffer)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str, kinds: Set[str]) -> str:
    return json.dumps(read_value(text, kinds), ensure_ascii=False)
