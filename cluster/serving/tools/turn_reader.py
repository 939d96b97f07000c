"""The base of readers that split an assistant's turn into content and tool calls."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from cluster.serving.text.text_stream import overlap
from cluster.serving.tools.object_text import ObjectText

__all__ = [
    "NO_ARGUMENTS",
    "ArgumentsReader",
    "TextDelta",
    "ToolCallDelta",
    "ToolSchemas",
    "TurnDelta",
    "TurnReader",
]

ToolSchemas: TypeAlias = Mapping[str, Mapping[str, object]]
"""The JSON schemas of the arguments of tools, by their names."""

NO_ARGUMENTS = ("null", "None", '""', "''")
"""How models write that a call has no arguments, beside an empty object."""
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """The new text of one tool call."""

    index: int
    """Index of the call in its turn."""
    id: str | None = None
    """Set once, with the name, before any arguments."""
    name: str | None = None
    arguments: str = ""
    """New text of the JSON arguments."""


class TextDelta(NamedTuple):
    """New text of one kind."""

    kind: Literal["reasoning", "content"]
    text: str


class TurnDelta:
    """Progress of a turn, in its order, which does not depend on the sizes of outputs."""

    __slots__ = ("parts",)

    def __init__(self, *, reasoning: str = "", content: str = "") -> None:
        self.parts: list[TextDelta | ToolCallDelta] = []
        self.add_text("reasoning", reasoning)
        self.add_text("content", content)

    @property
    def reasoning(self) -> str:
        """All new text of the reasoning."""
        return self._text("reasoning")

    @property
    def content(self) -> str:
        """All new text of the answer."""
        return self._text("content")

    @property
    def calls(self) -> list[ToolCallDelta]:
        """Progress of the tool calls."""
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]

    def add_text(self, kind: Literal["reasoning", "content"], text: str) -> None:
        """Append text, unless it is empty."""
        if text:
            self.parts.append(TextDelta(kind, text))

    def add_call(self, call: ToolCallDelta) -> None:
        """Append a part of a call."""
        self.parts.append(call)

    def add_delta(self, other: TurnDelta) -> None:
        """Add later progress of the turn."""
        self.parts += other.parts

    def drop_reasoning(self) -> None:
        """Remove the reasoning."""
        self.parts = [
            part
            for part in self.parts
            if isinstance(part, ToolCallDelta) or part.kind != "reasoning"
        ]

    def _text(self, kind: Literal["reasoning", "content"]) -> str:
        return "".join(
            part.text
            for part in self.parts
            if not isinstance(part, ToolCallDelta) and part.kind == kind
        )


class TurnReader(ABC):
    """Reads one turn; text that is not a call of a known tool is content."""

    def __init__(self, tools: ToolSchemas, *, is_parallel: bool, has_short_ids: bool) -> None:
        self.num_calls = 0
        """Number of calls that have begun."""
        self.has_grammar = False
        """Whether a grammar ensures that no mark of a call is missing."""
        self._tools = tools
        self._is_parallel = is_parallel
        self._has_short_ids = has_short_ids
        self._buffer = ""
        self._held_space = ""
        self._head = ""
        """Marks of a call that has not begun; content if no call follows."""
        self._has_content = False
        self._is_cut_off = False
        """Whether the turn ended, but not because the model ended it."""
        self._delta = TurnDelta()

    def read_piece(self, text: str) -> TurnDelta:
        """Return the content and tool calls that the text completes."""
        self._buffer += text
        return self._read(is_end=False)

    def flush(self, *, is_cut_off: bool = False) -> TurnDelta:
        """Return the rest of the turn, which `is_cut_off` unless the model ended it."""
        self._is_cut_off = is_cut_off
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> TurnDelta:
        self._delta = TurnDelta()
        # Each step consumes some of the buffer or is the last.
        while self._step(is_end=is_end):
            pass
        if is_end:
            self._write_head()
        if is_end and not self.num_calls:
            self._delta.add_text("content", self._held_space)
        return self._delta

    @abstractmethod
    def _step(self, *, is_end: bool) -> bool:
        """Consume some of the buffer; return whether to continue."""

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _write(self, content: str) -> None:
        """Add content, without the space around calls."""
        if self.num_calls and not self._has_content:
            content = content.lstrip()
        kept = content.rstrip()
        if not kept:
            self._held_space += content
            return
        self._has_content = True
        self._delta.add_text("content", self._held_space + kept)
        self._held_space = content[len(kept) :]

    def _write_head(self) -> None:
        """Add the marks that no call follows to the content."""
        head, self._head = self._head, ""
        self._write(head)

    def _write_until(self, *marks: str, is_end: bool) -> str:
        """Add content up to the first of several marks, which is consumed and returned."""
        found = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            self._write(self._take(place))
            return self._take(len(mark))
        num_held = 0 if is_end else max(overlap(self._buffer, mark) for mark in marks)
        self._write(self._take(len(self._buffer) - num_held))
        return ""

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self._held_space = self._head = ""
        if not self._is_dropped():
            self._delta.add_call(
                ToolCallDelta(index=self.num_calls - 1, id=self._new_id(), name=name)
            )

    def _write_arguments(self, arguments: str) -> None:
        if arguments and not self._is_dropped():
            self._delta.add_call(ToolCallDelta(index=self.num_calls - 1, arguments=arguments))

    def _is_dropped(self) -> bool:
        return self.num_calls > 1 and not self._is_parallel

    def _new_id(self) -> str:
        # The templates of Mistral's models reject other ids.
        if self._has_short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class ArgumentsReader(TurnReader):
    """Base of the formats that write the arguments of a call after its name, as a JSON object."""

    _marks: ClassVar[tuple[str, ...]] = ()
    """The marks that end arguments."""
    _string_mark: ClassVar[str] = ""
    """A mark around strings."""
    _arguments: ObjectText | None = None
    """The arguments that are being read."""

    def _step_arguments(self, *, is_end: bool) -> bool:
        """Read the arguments of the last call; return whether they are complete."""
        if self._arguments is None:
            begun = self._buffer.lstrip()
            may_be_empty = any(one.startswith(begun) for one in NO_ARGUMENTS)
            if may_be_empty and not (is_end or begun in NO_ARGUMENTS):
                return False
            if not begun.startswith("{"):
                written = next((one for one in NO_ARGUMENTS if begun.startswith(one)), "")
                if written or begun or not self._is_cut_off:
                    self._buffer = begun[len(written) :]
                    self._write_arguments("{}")
                return True
            self._buffer = begun
            self._arguments = ObjectText(marks=self._marks, string_mark=self._string_mark)
        found = self._arguments
        is_last = is_end and not self._is_cut_off
        self._take(found.read_object(self._buffer, is_end=is_last))
        if is_end and not found.is_closed:
            (found.cut if self._is_cut_off else found.close)()
        self._write_arguments(found.take_text())
        if not (found.is_closed or is_end):
            return False
        self._buffer = self._buffer if found.is_closed else ""
        self._arguments = None
        return True
