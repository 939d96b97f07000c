"""Incremental parsers of an assistant's turn into content and tool calls.

The format of tool calls depends on the chat template; each reader knows one. This module knows no
protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cluster.serving.text.marks import overlap
from cluster.serving.tools.tool_call_object import ToolCallObject
from cluster.serving.tools.turn_reader import TurnReader

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "TOOL_CALL_FORMATS",
    "ToolCallFormat",
    "detect_format",
    "list_reader",
    "named_reader",
    "turn_reader",
]

ToolCallFormat = Literal["hermes", "llama3_json", "mistral"]
"""`<tool_call>{...}</tool_call>`; a JSON object alone; `[TOOL_CALLS]` before a list or a name."""
TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = ("hermes", "llama3_json", "mistral")

_HERMES_BEGIN = "<tool_call>"
_HERMES_END = "</tool_call>"
_LLAMA_BEGIN = "<|python_tag|>"
_MISTRAL_BEGIN = "[TOOL_CALLS]"
_MISTRAL_ARGUMENTS = "[ARGS]"
_MISTRAL_ID = "[CALL_ID]"
_MAX_NAME_LENGTH = 128


def detect_format(template: str) -> ToolCallFormat | None:
    """Return the format of a chat template's tool calls; None if it is unknown."""
    if "tools" not in template:
        return None
    if _MISTRAL_BEGIN in template:
        return "mistral"
    if _HERMES_BEGIN in template:
        # Some templates use XML instead of JSON inside the tag.
        return None if "<function=" in template else "hermes"
    if _LLAMA_BEGIN in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return None


def turn_reader(
    tool_format: ToolCallFormat, names: Collection[str], *, is_parallel: bool
) -> TurnReader:
    """Return the reader of a turn in which the model may call the named tools.

    Unless `is_parallel`, all calls but the first are dropped.
    """
    kinds: dict[ToolCallFormat, type[TurnReader]] = {
        "hermes": _HermesReader,
        "llama3_json": _LlamaReader,
        "mistral": _MistralReader,
    }
    return kinds[tool_format](
        names, is_parallel=is_parallel, has_short_ids=tool_format == "mistral"
    )


def list_reader(names: Collection[str], *, is_parallel: bool, has_short_ids: bool) -> TurnReader:
    """Return the reader of a turn that is a JSON list of calls."""
    return _ListReader(names, is_parallel=is_parallel, has_short_ids=has_short_ids)


def named_reader(name: str, *, has_short_ids: bool) -> TurnReader:
    """Return the reader of a turn that is the arguments of the named tool."""
    return _NamedReader((name,), is_parallel=False, has_short_ids=has_short_ids)


class _ObjectsReader(TurnReader):
    """Base of the formats that write calls as JSON objects."""

    def __init__(self, names: Collection[str], *, is_parallel: bool, has_short_ids: bool) -> None:
        super().__init__(names, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._object: ToolCallObject | None = None
        self._has_begun = False

    def _step_object(self, *, is_end: bool) -> Literal["open", "call", "content"]:
        """Read an object and return whether it is open, a call, or content.

        The text of content is put back into the buffer.
        """
        if self._object is None:
            self._object = ToolCallObject()
            self._has_begun = False
        found = self._object
        self._take(found.read_object(self._buffer))
        if not self._has_begun and found.name in self._names:
            self._has_begun = True
            self._begin_call(found.name or "")
        is_unknown = found.name is not None and not self._has_begun
        if self._has_begun:
            self._write_arguments(found.take_arguments())
        if not (found.is_done or found.is_broken or is_unknown or is_end):
            return "open"
        self._object = None
        if self._has_begun:
            return "call"
        self._buffer = found.raw + self._buffer
        return "content"


class _HermesReader(_ObjectsReader):
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number among content."""

    _where: Literal["content", "call", "end"] = "content"

    def _step(self, *, is_end: bool) -> bool:
        if self._where == "content":
            if self._write_until(_HERMES_BEGIN, is_end=is_end):
                self._where = "call"
                return True
            return False
        if self._where == "call":
            found = self._step_object(is_end=is_end)
            if found == "content":
                self._write(_HERMES_BEGIN)
            if found != "open":
                self._where = "end" if found == "call" else "content"
            return found != "open" and bool(self._buffer)
        before, mark, after = self._buffer.partition(_HERMES_END)
        if mark:
            # Text between a call and its end tag is dropped: it is not content.
            self._buffer = after
            self._where = "content"
            return True
        self._buffer = before[len(before) - overlap(before, _HERMES_END) :]
        return False


class _LlamaReader(_ObjectsReader):
    """`{"name": ..., "parameters": ...}` alone, or several separated by semicolons."""

    _where: Literal["start", "call", "between", "content"] = "start"

    def _step(self, *, is_end: bool) -> bool:
        if self._where == "content":
            self._write(self._take(len(self._buffer)))
            return False
        if self._where == "call":
            found = self._step_object(is_end=is_end)
            if found != "open":
                self._where = "between" if found == "call" else "content"
            return found != "open" and bool(self._buffer)
        return self._step_between(is_end=is_end)

    def _step_between(self, *, is_end: bool) -> bool:
        begun = self._buffer.lstrip() if self._where == "start" else self._buffer.lstrip(" \t\r\n;")
        if not begun:
            return False
        if begun.startswith(_LLAMA_BEGIN):
            self._buffer = begun[len(_LLAMA_BEGIN) :]
            return True
        if not is_end and _LLAMA_BEGIN.startswith(begun):
            return False
        if begun[0] == "{":
            self._buffer = begun
            self._where = "call"
        else:
            self._where = "content"
        return True


class _ListReader(_ObjectsReader):
    """A JSON list of `{"name": ..., "parameters": ...}`."""

    _where: Literal["start", "between", "call", "content", "end"] = "start"

    def _step(self, *, is_end: bool) -> bool:
        if self._where == "content":
            self._write(self._take(len(self._buffer)))
            return False
        if self._where == "end":
            self._buffer = ""
            return False
        if self._where == "call":
            found = self._step_object(is_end=is_end)
            if found != "open":
                self._where = "between" if found == "call" else "content"
            return found != "open" and bool(self._buffer)
        return self._step_between()

    def _step_between(self) -> bool:
        self._take_space()
        if not self._buffer:
            return False
        first = self._buffer[0]
        if self._where == "start" and first == "[":
            self._where = "between"
            self._take(1)
        elif self._where == "between" and first == "{":
            self._where = "call"
        elif self._where == "between" and first == ",":
            self._take(1)
        elif self._where == "between" and first == "]":
            self._where = "end"
        else:
            self._where = "content"
        return True


class _MistralReader(TurnReader):
    """Content, then `[TOOL_CALLS]` and a list, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    _where: Literal["content", "begun", "list", "name", "arguments"] = "content"

    def __init__(self, names: Collection[str], *, is_parallel: bool, has_short_ids: bool) -> None:
        super().__init__(names, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._list = _ListReader(names, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._arguments = _ObjectEnd()

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                if self._write_until(_MISTRAL_BEGIN, is_end=is_end):
                    self._where = "begun"
                    return True
                return False
            case "begun":
                self._take_space()
                if not self._buffer:
                    return False
                self._where = "list" if self._buffer[0] == "[" else "name"
                # Calls with names may precede the list.
                self._list.num_calls = self.num_calls
                return True
            case "list":
                self._step_list(is_end=is_end)
                return False
            case "name":
                return self._step_name(is_end=is_end)
            case "arguments":
                return self._step_arguments()

    def _step_list(self, *, is_end: bool) -> None:
        text = self._take(len(self._buffer))
        deltas = [self._list.read_piece(text), *([self._list.flush()] if is_end else [])]
        for delta in deltas:
            self._delta.calls += delta.calls
            self._delta.content += delta.content
        self.num_calls = self._list.num_calls

    def _step_name(self, *, is_end: bool) -> bool:
        length = self._buffer.find("{", 0, _MAX_NAME_LENGTH)
        if length < 0:
            if not is_end and len(self._buffer) < _MAX_NAME_LENGTH:
                return False
            self._write(_MISTRAL_BEGIN + self._take(_MAX_NAME_LENGTH))
            self._where = "content"
            return bool(self._buffer)
        head = self._take(length)
        name = head.partition(_MISTRAL_ARGUMENTS)[0].partition(_MISTRAL_ID)[0].strip()
        if name not in self._names:
            self._write(_MISTRAL_BEGIN + head)
            self._where = "content"
            return True
        self._begin_call(name)
        self._arguments = _ObjectEnd()
        self._where = "arguments"
        return True

    def _step_arguments(self) -> bool:
        self._write_arguments(self._take(self._arguments.read_object(self._buffer)))
        if not self._arguments.is_closed:
            return False
        self._where = "content"
        return bool(self._buffer)


class _NamedReader(TurnReader):
    """The arguments of a tool that must be called."""

    def _step(self, *, is_end: bool) -> bool:
        if not self.num_calls:
            (name,) = self._names
            self._begin_call(name)
        self._write_arguments(self._take(len(self._buffer)))
        return False


class _ObjectEnd:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self.is_closed = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def read_object(self, text: str) -> int:
        """Read text and return how many of its characters belong to the object."""
        for position, character in enumerate(text):
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_in_string = False
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_closed = True
                    return position + 1
        return len(text)
