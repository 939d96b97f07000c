"""A reader of turns in channels, as gpt-oss writes them (OpenAI's harmony format).

A turn is messages, each with a header: `analysis` is reasoning, `commentary` to a function is a
call, all else is content.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypeAlias

from cluster.serving.text.marks import overlap
from cluster.serving.tools.channel_headers import (
    END_MARKS,
    MAX_HEADER_LENGTH,
    MESSAGE_MARK,
    START_MARK,
    begins_header,
    is_cut_header,
    read_header,
)
from cluster.serving.tools.turn_reader import NO_ARGUMENTS, ArgumentsReader
from pagedray.reasoning import WHITESPACE

if TYPE_CHECKING:
    from collections.abc import Collection

    from cluster.serving.tools.turn_reader import ToolSchemas, TurnDelta, TurnReader

__all__ = ["ChannelReader", "ChannelTexts"]

_Where: TypeAlias = Literal["start", "between", "header", "reasoning", "call", "behind", "content"]
_REASONING_ENDS = END_MARKS[:1]
_REASONING_END = re.compile(re.escape(END_MARKS[0]))
_ANY_END = re.compile("|".join(map(re.escape, END_MARKS)))


class ChannelReader(ArgumentsReader):
    """Messages with headers; the first may lack `<|start|>assistant`, which ends a prompt."""

    _marks = END_MARKS

    def __init__(
        self,
        tools: ToolSchemas,
        *,
        is_parallel: bool = True,
        has_short_ids: bool = False,
        answer: TurnReader | None = None,
        is_open: bool = False,
    ) -> None:
        """`answer` reads the content, which is calls if they are forced.

        `is_open` is true if the prompt has begun a message of reasoning.
        """
        super().__init__(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._answer = answer
        self._where: _Where
        self._where = "reasoning" if is_open else "start"
        self._ends: tuple[str, ...] = _REASONING_ENDS if is_open else END_MARKS
        """The marks that end the message."""
        self._held_mark = ""
        """The mark that ended content, which is text unless a header follows it."""
        self._name = ""
        """The function of a call that has not begun."""
        self._has_reasoning = False
        """Whether a message had reasoning, so that more reasoning needs a line of its own."""
        self._is_next_line = False

    @property
    def tool_names(self) -> Collection[str]:
        """The functions with calls that are messages."""
        return self._tools.keys()

    def flush(self, *, is_cut_off: bool = False) -> TurnDelta:
        super().flush(is_cut_off=is_cut_off)
        if self._answer is not None:
            self._add(self._answer.flush(is_cut_off=is_cut_off), self._answer)
        return self._delta

    def _step(self, *, is_end: bool) -> bool:
        if self._where in ("start", "between"):
            return self._begin_message(is_end=is_end)
        if self._where == "header":
            return self._step_header(is_end=is_end)
        if self._where == "call":
            return self._step_call(is_end=is_end)
        place, mark = self._first_end()
        if mark is None:
            num_held = 0 if is_end else max(overlap(self._buffer, end) for end in self._ends)
            self._write_body(self._take(len(self._buffer) - num_held))
            return False
        self._write_body(self._take(place))
        if mark != START_MARK:
            self._take(len(mark))
            self._held_mark = mark if self._where == "content" else ""
        self._where = "between"
        return True

    def _begin_message(self, *, is_end: bool) -> bool:
        """Begin a header or content; return whether the text suffices to know which."""
        is_first = self._where == "start"
        is_header = begins_header(self._buffer, is_first=is_first)
        if is_header is None and not is_end:
            return False
        if is_header is None and self._buffer.lstrip(WHITESPACE) == START_MARK:
            is_header = True
        if is_header is None and not is_first:
            # Cut off after a message, or at the start of a header.
            self._buffer = ""
            return False
        if is_header:
            self._where = "header"
            return True
        self._where, self._ends = "content", END_MARKS
        self._write_content(self._take_held_mark())
        begun = self._buffer.lstrip(WHITESPACE)
        if begun.startswith(START_MARK):
            num_whitespace = len(self._buffer) - len(begun)
            self._write_content(self._take(num_whitespace + len(START_MARK)))
        return True

    def _step_header(self, *, is_end: bool) -> bool:
        most = MAX_HEADER_LENGTH + len(MESSAGE_MARK)
        place = self._buffer.find(MESSAGE_MARK, 0, most)
        if place < 0:
            if not is_end and len(self._buffer) < most:
                return False
            is_cut = is_cut_header(self._buffer)
            text = self._take(MAX_HEADER_LENGTH)
            if is_cut:
                return False
            self._where, self._ends = "content", END_MARKS
            self._write_content(self._take_held_mark() + text)
            return True
        text, mark = self._take(place), self._take(len(MESSAGE_MARK))
        self._held_mark, self._ends = "", END_MARKS
        header = read_header(text, self._tools)
        self._where = header.kind
        if header.kind == "call":
            self._name = header.function
        elif header.kind == "reasoning":
            self._is_next_line = self._has_reasoning
            if not header.has_recipient:
                # A grammar applies only after this mark.
                self._ends = _REASONING_ENDS
        elif header.has_recipient:
            self._write_content(text + mark)
        return True

    def _first_end(self) -> tuple[int, str | None]:
        """Return the place and the mark of the end of a message in the buffer."""
        found = (_REASONING_END if self._ends == _REASONING_ENDS else _ANY_END).search(self._buffer)
        return (-1, None) if found is None else (found.start(), found[0])

    def _take_held_mark(self) -> str:
        mark, self._held_mark = self._held_mark, ""
        return mark

    def _step_call(self, *, is_end: bool) -> bool:
        if self._name:
            begun = self._buffer.lstrip()
            words = (*NO_ARGUMENTS, *END_MARKS)
            if not is_end and any(word.startswith(begun) for word in words):
                return False
            if begun and not begun.startswith(("{", *words)):
                self._where = "content"
                return True
            if not begun and self._is_cut_off:
                return False
            self._begin_call(self._name)
            self._name = ""
        if not self._step_arguments(is_end=is_end):
            return False
        self._where = "behind"
        return bool(self._buffer)

    def _write_body(self, text: str) -> None:
        if self._where == "reasoning":
            if text and self._is_next_line:
                text, self._is_next_line = f"\n{text}", False
            self._has_reasoning = self._has_reasoning or bool(text)
            self._delta.add_text("reasoning", text)
        else:
            self._write_content(text)

    def _write_content(self, text: str) -> None:
        if self._answer is None:
            self._write(text)
        else:
            self._add(self._answer.read_piece(text), self._answer)

    def _add(self, read: TurnDelta, answer: TurnReader) -> None:
        self._delta.add_delta(read)
        self.num_calls = answer.num_calls


class ChannelTexts:
    """Splits the text of a turn in channels into reasoning and content."""

    def __init__(self, *, is_open: bool = False) -> None:
        """`is_open` is true if the prompt has begun a message of reasoning."""
        self._reader = ChannelReader({}, is_open=is_open)

    def read_piece(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content that the text completes."""
        read = self._reader.read_piece(text)
        if not is_last:
            return read.reasoning, read.content
        rest = self._reader.flush()
        return read.reasoning + rest.reasoning, read.content + rest.content
