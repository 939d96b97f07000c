"""Readers of tool calls that models write as JSON objects."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from cluster.serving.tools.object_text import MAX_DEPTH, ObjectText
from cluster.serving.tools.turn_reader import ArgumentsReader, TurnReader

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import ToolSchemas

__all__ = [
    "DEEPSEEK_BEGIN",
    "DEEPSEEK_CALL_BEGIN",
    "DEEPSEEK_CALL_END",
    "DEEPSEEK_END",
    "DEEPSEEK_SEPARATOR",
    "GEMMA_BEGIN",
    "GEMMA_END",
    "HERMES_BEGIN",
    "HERMES_END",
    "LLAMA_BEGIN",
    "MISTRAL_BEGIN",
    "ChoiceReader",
    "DeepSeekReader",
    "GemmaReader",
    "HermesReader",
    "ListReader",
    "LlamaReader",
    "MistralReader",
    "NamedReader",
]

HERMES_BEGIN = "<tool_call>"
HERMES_END = "</tool_call>"
GEMMA_BEGIN = "<|tool_call>"
GEMMA_END = "<tool_call|>"
_GEMMA_STRING = '<|"|>'
_GEMMA_NAME = re.compile(r"\s*(?:call:\s*|(?!call:))([\w.\-]+)\s*")
_MAX_GEMMA_HEAD_LENGTH = 256
LLAMA_BEGIN = "<|python_tag|>"
MISTRAL_BEGIN = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(
    r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]|(?=\{|\[TOOL_CALLS\]))"
)
_MAX_NAME_LENGTH = 128
_ListPlace: TypeAlias = Literal[
    "content", "begun", "between", "call", "behind", "name", "arguments"
]
_EXCESS = re.compile(r"(?:\s*[}\]),;])+")
"""Excess characters that models write behind a call."""
_ARGUMENTS = ("arguments", "parameters")
_MAX_HEAD_LENGTH = 4096
"""The most characters of an object before its name, without its arguments."""

DEEPSEEK_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
DEEPSEEK_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
DEEPSEEK_CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
DEEPSEEK_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_MARKS = (DEEPSEEK_CALL_BEGIN, DEEPSEEK_CALL_END, DEEPSEEK_END, DEEPSEEK_BEGIN)
_MAX_DEEPSEEK_HEAD_LENGTH = 256
_FENCE = "```"
_HEAD_END = re.compile("|".join(map(re.escape, ("{", *_MARKS))))
_FUNCTION_NAME = re.compile(r"\s*([^\s`{]+)")
_FENCE_BEGIN = re.compile(r"\s*(?:```(?:json)?)?")


class _ObjectsReader(TurnReader):
    """Base of the formats that write calls as objects."""

    _marks: ClassVar[tuple[str, ...]] = ()
    """The marks that end an object outside of its strings."""

    def __init__(self, tools: ToolSchemas, *, is_parallel: bool, has_short_ids: bool) -> None:
        super().__init__(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._object: ToolCallObject | None = None
        self._has_begun = False

    def _step_object(self, *, is_end: bool) -> Literal["open", "call", "content"]:
        """Read an object and return whether it is open, a call, or content.

        The text of content is put back into the buffer.
        """
        if self._object is None:
            self._object = ToolCallObject(marks=self._marks)
            self._has_begun = False
        found = self._object
        is_last = is_end and not self._is_cut_off
        self._take(found.read_object(self._buffer, is_end=is_last))
        if not self._has_begun and found.name in self._tools:
            self._has_begun = True
            self._begin_call(found.name or "")
        if self._has_begun:
            if is_end and not found.is_closed:
                (found.cut if self._is_cut_off else found.close)()
            self._write_arguments(found.take_arguments())
        is_content = found.is_broken or (found.name is not None and not self._has_begun)
        if not (found.is_closed or is_content or is_end):
            return "open"
        self._object = None
        if self._has_begun:
            self._buffer = self._buffer if found.is_closed else ""
            return "call"
        self._buffer = found.raw + self._buffer
        return "content"

    def _drop_excess(self) -> None:
        """Drop brackets and separators behind a call."""
        found = _EXCESS.match(self._buffer)
        if found is not None:
            self._take(found.end())


class HermesReader(_ObjectsReader):
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number among content."""

    _marks = (HERMES_BEGIN, HERMES_END)
    _where: Literal["content", "begun", "call", "behind"] = "content"
    _is_open = False
    """Whether the end mark of a call is missing."""

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                marks = self._marks if self._is_open else (HERMES_BEGIN,)
                found = self._write_until(*marks, is_end=is_end)
                self._is_open = self._is_open and not found
                if found == HERMES_BEGIN:
                    self._head, self._where = found, "begun"
                return bool(found)
            case "begun":
                begun = self._buffer.lstrip()
                if begun.startswith(HERMES_BEGIN):
                    self._buffer = begun[len(HERMES_BEGIN) :]
                    return True
                if not is_end and HERMES_BEGIN.startswith(begun):
                    return False
                self._where = "call"
                return True
            case "call":
                found = self._step_object(is_end=is_end)
                if found == "open":
                    return False
                self._is_open = found == "call"
                self._where = "behind" if found == "call" else "content"
                self._write_head()
                return bool(self._buffer)
            case "behind":
                self._drop_excess()
                begun = self._buffer.lstrip()
                if not begun and not is_end:
                    return False
                self._where = "call" if begun.startswith("{") else "content"
                return bool(begun)


class LlamaReader(_ObjectsReader):
    """`{"name": ..., "parameters": ...}` alone, or several separated by semicolons."""

    _marks = (LLAMA_BEGIN,)
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
        if self._where == "between":
            self._drop_excess()
        begun = self._buffer.lstrip()
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

    _where: _ListPlace = "begun"

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "begun":
                return self._step_begun(is_end=is_end)
            case "between":
                return self._step_between()
            case "call":
                found = self._step_object(is_end=is_end)
                if found == "open":
                    return False
                self._where = "between" if found == "call" else "content"
                self._write_head()
                return bool(self._buffer)
            case "behind":
                self._drop_excess()
                if not self._buffer.strip() and not is_end:
                    return False
                self._where = "content"
                return True
            case _:
                self._write(self._take(len(self._buffer)))
                return False

    def _step_begun(self, *, is_end: bool) -> bool:
        """Read the beginning of calls."""
        begun = self._buffer.lstrip()
        if not begun:
            return False
        if begun[0] == "[":
            self._head += self._take(len(self._buffer) - len(begun) + 1)
        self._where = "between" if begun[0] in "[{" else "content"
        return True

    def _step_between(self) -> bool:
        begun = self._buffer.lstrip()
        if not begun:
            return False
        if begun[0] == "{":
            self._where = "call"
        elif begun[0] == "]" and not self._head:
            self._where = "behind"
        elif begun[0] == ",":
            self._buffer = begun[1:]
        else:
            self._where = "content"
            self._write_head()
        return True


class MistralReader(ListReader, ArgumentsReader):
    """Content, then `[TOOL_CALLS]` and a list, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    _marks = (MISTRAL_BEGIN,)
    _where: _ListPlace = "content"

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                self._head = self._write_until(MISTRAL_BEGIN, is_end=is_end)
                self._where = "begun" if self._head else "content"
                return bool(self._head)
            case "name":
                return self._step_name(is_end=is_end)
            case "arguments":
                if not self._step_arguments(is_end=is_end):
                    return False
                # The mark of another call may be missing.
                self._where = "name"
                return True
            case _:
                return super()._step(is_end=is_end)

    def _step_begun(self, *, is_end: bool) -> bool:
        begun = self._buffer.lstrip()
        if begun[:1] in ("[", "{"):
            return super()._step_begun(is_end=is_end)
        self._where = "name" if begun or is_end else "begun"
        return self._where == "name"

    def _step_name(self, *, is_end: bool) -> bool:
        if not self._head:
            self._drop_excess()
        begun = self._buffer.lstrip()
        found = _MISTRAL_HEAD.match(begun)
        is_last = is_end and self._head and not self._is_cut_off
        name = found[1] if found is not None else begun.strip() if is_last else ""
        if name in self._tools:
            self._buffer = begun[len(begun) if found is None else found.end() :]
            self._begin_call(name)
            self._where = "arguments"
            return True
        if found is None and not is_end and self._may_be_head(begun):
            return False
        self._where = "content"
        self._write_head()
        return bool(self._buffer)

    def _may_be_head(self, begun: str) -> bool:
        """Return whether a text may be the beginning of a call."""
        word = re.split(r"[\s\[{]", begun, maxsplit=1)[0]
        if word == begun:
            return any(name.startswith(word) for name in self._tools)
        rest = begun[len(word) :].lstrip()
        return word in self._tools and rest[:1] in ("", "[") and len(begun) < _MAX_NAME_LENGTH


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


class NamedReader(ArgumentsReader):
    """The arguments of a tool that must be called."""

    _is_complete = False

    def _step(self, *, is_end: bool) -> bool:
        if not self._is_complete and (self.num_calls or self._buffer.strip()):
            if not self.num_calls:
                # Not before: the turn's reasoning comes first.
                (name,) = self._tools
                self._begin_call(name)
            self._is_complete = self._step_arguments(is_end=is_end)
        if self._is_complete or is_end:
            self._write(self._take(len(self._buffer)))
        return False


class ToolCallObject(ObjectText):
    """Reads `{"name": ..., "arguments": {...}}`, with keys in any order.

    Arguments may also be a string that contains the object. Arguments of another type are left out.
    """

    def __init__(self, *, marks: tuple[str, ...] = ()) -> None:
        super().__init__(marks=marks)
        self.raw = ""
        """The text read so far."""
        self.name: str | None = None
        """The tool, once its name has been read."""
        self._key = ""
        self._value = ""
        self._is_argument = False
        """Whether the value that is open is the object of the arguments."""
        self._arguments = ""
        self._has_arguments = False

    @property
    def is_broken(self) -> bool:
        """Whether the text is not such an object; then no more is read."""
        num_others = 0 if self._is_argument else len(self.raw) - len(self._arguments)
        return self.name is None and (self.is_closed or num_others > _MAX_HEAD_LENGTH)

    def read_object(self, text: str, *, is_end: bool = False) -> int:
        length = super().read_object(text, is_end=is_end)
        self.raw += text[:length]
        return length

    def take_arguments(self) -> str:
        """Return the new text of the arguments; `{}` at the end of a call without arguments."""
        if self.is_closed and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        taken, self._arguments = self._arguments, ""
        return taken

    def _write(self, text: str) -> None:
        if len(self._open) > MAX_DEPTH:
            return
        if self._is_argument:
            self._arguments += text
        elif len(self._open) == 1 and self._where == "key":
            self._key += text
        elif self._open:
            self._value += text
            if self._value == "{" and not self._has_arguments:
                self._is_argument = self._has_arguments = json.loads(self._key) in _ARGUMENTS
                self._arguments = self._value if self._is_argument else ""

    def _write_between(self, text: str) -> None:
        if len(self._open) > 1:
            self._write(text)

    def _end_value(self) -> None:
        super()._end_value()
        if len(self._open) != 1:
            return
        if self._value and not self._is_argument:
            self._read_member(json.loads(self._key))
        self._key = self._value = ""
        self._is_argument = False

    def _read_member(self, key: str) -> None:
        value = json.loads(self._value) if self._value[0] == '"' else None
        if not isinstance(value, str):
            # A name of another type is none.
            self.is_closed = self.is_closed or (key == "name" and self.name is None)
        elif key == "name" and self.name is None:
            # The call of the first name may have begun.
            self.name = value
        elif key in _ARGUMENTS and not self._has_arguments and value.lstrip()[:1] == "{":
            inner = ObjectText()
            inner.read_object(value, is_end=True)
            inner.close()
            self._has_arguments = True
            self._arguments += inner.take_text()

    def _damage(self) -> None:
        super()._damage()
        # Other text may begin with a bracket, too.
        self.is_closed = self.is_closed or (self.name is None and not self._is_argument)

    def _skip(self) -> int:
        if self.name is not None and len(self._open) == 1:
            # The rest is no part of the call.
            self.close()
            return 0
        return super()._skip()


class GemmaReader(ArgumentsReader):
    """`call:NAME{key:value}` between marks; keys have no quotes, and strings a mark around them."""

    _marks = (GEMMA_END, GEMMA_BEGIN)
    _string_mark = _GEMMA_STRING
    _where: Literal["content", "name", "arguments"] = "content"
    _is_open = False
    """Whether the last mark of a call is missing."""

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                marks = (GEMMA_BEGIN, GEMMA_END) if self._is_open else (GEMMA_BEGIN,)
                found = self._write_until(*marks, is_end=is_end)
                self._is_open = self._is_open and not found
                if found == GEMMA_BEGIN:
                    self._head, self._where = found, "name"
                return bool(found)
            case "name":
                return self._step_name(is_end=is_end)
            case "arguments":
                if not self._step_arguments(is_end=is_end):
                    return False
                self._where, self._is_open = "content", True
                return bool(self._buffer)

    def _step_name(self, *, is_end: bool) -> bool:
        found = _GEMMA_NAME.match(self._buffer)
        rest = "" if found is None else self._buffer[found.end() :]
        if not rest and not is_end and len(self._buffer) < _MAX_GEMMA_HEAD_LENGTH:
            return False
        is_complete = rest[:1] in ("{", "<") if rest else is_end and not self._is_cut_off
        is_short = found is not None and found.end() < _MAX_GEMMA_HEAD_LENGTH
        if found is not None and is_short and is_complete and found[1] in self._tools:
            self._take(found.end())
            self._begin_call(found[1])
            self._where = "arguments"
            return True
        self._where = "content"
        self._write_head()
        return bool(self._buffer)


class DeepSeekReader(ArgumentsReader):
    """Content, then marked calls: `function`, a separator and the name, then JSON in a fence (V3).

    Since V3.1 it is the name, the separator and JSON.
    """

    _marks = _MARKS
    _where: Literal["content", "between", "head", "arguments", "behind"] = "content"

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content" | "between":
                marks = _MARKS if self._where == "between" else (_MARKS[0], _MARKS[-1])
                found = self._write_until(*marks, is_end=is_end)
                if found == DEEPSEEK_END:
                    self._where = "content"
                elif found:
                    self._where = "head" if found == DEEPSEEK_CALL_BEGIN else "between"
                    self._head += "" if found == DEEPSEEK_CALL_END else found
                return bool(found)
            case "head":
                return self._step_head(is_end=is_end)
            case "arguments":
                if self._step_arguments(is_end=is_end):
                    self._where = "behind"
                    return True
                return False
            case "behind":
                begun = self._buffer.lstrip()
                if not is_end and _FENCE.startswith(begun):
                    return False
                self._buffer = begun.removeprefix(_FENCE)
                self._where = "between"
                return True

    def _write(self, content: str) -> None:
        if self._head:
            # A mark of calls precedes the content.
            self._head += content
            if not content.strip():
                return
            content, self._head = self._head, ""
        super()._write(content)

    def _step_head(self, *, is_end: bool) -> bool:
        found = _HEAD_END.search(self._buffer, 0, _MAX_DEEPSEEK_HEAD_LENGTH)
        if found is None and not is_end and len(self._buffer) < _MAX_DEEPSEEK_HEAD_LENGTH:
            return False
        is_known = found is not None or (is_end and not self._is_cut_off)
        head = self._buffer if found is None else self._buffer[: found.start()]
        first, separator, second = head.partition(DEEPSEEK_SEPARATOR)
        name, length = first.strip(), len(first) + len(separator)
        function = _FUNCTION_NAME.match(second)
        if name == "function" and function is not None:
            name, length = function[1], length + function.end()
        if not is_known or name not in self._tools:
            self._write_head()
            self._where = "content"
            return bool(self._buffer)
        fence = _FENCE_BEGIN.match(self._buffer, length)
        assert fence is not None
        self._take(fence.end())
        self._begin_call(name)
        self._where = "arguments"
        return True
