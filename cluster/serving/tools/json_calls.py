"""Readers of tool calls that models write as JSON objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cluster.serving.text.marks import overlap
from cluster.serving.tools.object_end import ObjectEnd
from cluster.serving.tools.tool_call_object import ToolCallObject
from cluster.serving.tools.turn_reader import TurnReader

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import ToolSchemas

__all__ = [
    "HERMES_BEGIN",
    "HERMES_END",
    "LLAMA_BEGIN",
    "MISTRAL_BEGIN",
    "ChoiceReader",
    "HermesReader",
    "ListReader",
    "LlamaReader",
    "MistralReader",
    "NamedReader",
]

HERMES_BEGIN = "<tool_call>"
HERMES_END = "</tool_call>"
LLAMA_BEGIN = "<|python_tag|>"
MISTRAL_BEGIN = "[TOOL_CALLS]"
_MISTRAL_ARGUMENTS = "[ARGS]"
_MISTRAL_ID = "[CALL_ID]"
_MAX_NAME_LENGTH = 128


class _ObjectsReader(TurnReader):
    """Base of the formats that write calls as JSON objects."""

    def __init__(self, tools: ToolSchemas, *, is_parallel: bool, has_short_ids: bool) -> None:
        super().__init__(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
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
        if not self._has_begun and found.name in self._tools:
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


class HermesReader(_ObjectsReader):
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number among content."""

    _where: Literal["content", "call", "end"] = "content"

    def _step(self, *, is_end: bool) -> bool:
        if self._where == "content":
            if self._write_until(HERMES_BEGIN, is_end=is_end):
                self._where = "call"
                return True
            return False
        if self._where == "call":
            found = self._step_object(is_end=is_end)
            if found == "content":
                self._write(HERMES_BEGIN)
            if found != "open":
                self._where = "end" if found == "call" else "content"
            return found != "open" and bool(self._buffer)
        before, mark, after = self._buffer.partition(HERMES_END)
        if mark:
            # Text between a call and its end tag is dropped: it is not content.
            self._buffer = after
            self._where = "content"
            return True
        self._buffer = before[len(before) - overlap(before, HERMES_END) :]
        return False


class LlamaReader(_ObjectsReader):
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
        if begun.startswith(LLAMA_BEGIN):
            self._buffer = begun[len(LLAMA_BEGIN) :]
            return True
        if not is_end and LLAMA_BEGIN.startswith(begun):
            return False
        if begun[0] == "{":
            self._buffer = begun
            self._where = "call"
        else:
            self._where = "content"
        return True


class ListReader(_ObjectsReader):
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


class MistralReader(TurnReader):
    """Content, then `[TOOL_CALLS]` and a list, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    _where: Literal["content", "begun", "list", "name", "arguments"] = "content"

    def __init__(self, tools: ToolSchemas, *, is_parallel: bool, has_short_ids: bool) -> None:
        super().__init__(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._list = ListReader(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._arguments = ObjectEnd()

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                if self._write_until(MISTRAL_BEGIN, is_end=is_end):
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
            self._delta.add_delta(delta)
        self.num_calls = self._list.num_calls

    def _step_name(self, *, is_end: bool) -> bool:
        length = self._buffer.find("{", 0, _MAX_NAME_LENGTH)
        if length < 0:
            if not is_end and len(self._buffer) < _MAX_NAME_LENGTH:
                return False
            self._write(MISTRAL_BEGIN + self._take(_MAX_NAME_LENGTH))
            self._where = "content"
            return bool(self._buffer)
        head = self._take(length)
        name = head.partition(_MISTRAL_ARGUMENTS)[0].partition(_MISTRAL_ID)[0].strip()
        if name not in self._tools:
            self._write(MISTRAL_BEGIN + head)
            self._where = "content"
            return True
        self._begin_call(name)
        self._arguments = ObjectEnd()
        self._where = "arguments"
        return True

    def _step_arguments(self) -> bool:
        self._write_arguments(self._take(self._arguments.read_object(self._buffer)))
        if not self._arguments.is_closed:
            return False
        self._where = "content"
        return bool(self._buffer)


class ChoiceReader(_ObjectsReader):
    """A mark and JSON objects with a grammar's text around them, or content."""

    _where: Literal["start", "between", "call", "content"] = "start"

    def __init__(
        self, tools: ToolSchemas, *, mark: str, is_parallel: bool, has_short_ids: bool
    ) -> None:
        super().__init__(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._mark = mark

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "start":
                if self._buffer.startswith(self._mark):
                    self._take(len(self._mark))
                    self._where = "between"
                elif is_end or not self._mark.startswith(self._buffer):
                    self._where = "content"
                else:
                    return False
                return True
            case "between":
                begin = self._buffer.find("{")
                self._take(len(self._buffer) if begin < 0 else begin)
                self._where = "between" if begin < 0 else "call"
                return begin >= 0
            case "call":
                found = self._step_object(is_end=is_end)
                if found != "open":
                    self._where = "between" if found == "call" else "content"
                return found != "open" and bool(self._buffer)
            case "content":
                self._write(self._take(len(self._buffer)))
                return False


class NamedReader(TurnReader):
    """The arguments of a tool that must be called."""

    def _step(self, *, is_end: bool) -> bool:
        if self._buffer and not self.num_calls:
            # Not before: the turn's reasoning comes first.
            (name,) = self._tools
            self._begin_call(name)
        self._write_arguments(self._take(len(self._buffer)))
        return False
