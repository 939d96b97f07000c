"""A reader of turns in channels, as gpt-oss writes them (OpenAI's harmony format).

A turn is messages, each with a header that ends with `<|message|>`: `analysis` is reasoning,
`commentary` to a function is a call, all else is content.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from cluster.serving.text.marks import overlap
from cluster.serving.tools.object_end import ObjectEnd
from cluster.serving.tools.turn_reader import TurnReader
from pagedray.reasoning import BLANKS, MAX_BLANKS

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import ToolSchemas, TurnDelta

__all__ = ["CHANNEL_MARK", "ChannelReader", "ChannelTexts"]

CHANNEL_MARK = "<|channel|>"
_MESSAGE = "<|message|>"
_START = "<|start|>"
_END = "<|end|>"
_ENDS = (_END, "<|call|>", "<|return|>", _START)
_REASONING_END = re.compile(re.escape(_END))
_ANY_END = re.compile("|".join(map(re.escape, _ENDS)))

_ANALYSIS = "analysis"
_FUNCTIONS = "functions."
_HEADER_STARTS = (CHANNEL_MARK, _START, _MESSAGE)
_FIRST_STARTS = (*_HEADER_STARTS, "to=")
_MAX_BEGIN_LENGTH = MAX_BLANKS + 16
"""Of the text that shows whether a header begins."""
_MAX_HEADER_LENGTH = 512
_CHANNEL = re.compile(re.escape(CHANNEL_MARK) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NO_HEADER = re.compile(re.escape(_START) + r"[^\w<]")
"""A mark without the role that follows it in a header."""
_CUT_HEADER = re.compile(
    r"\s*+(?:<\|start\|>(?:[\w.:-]++\s*+)?+)?+"
    r"(?:to=[^\s<]*+\s*+)?+"
    r"(?:<\|channel\|>\s*+(?:\w++\s*+)?+)?+"
    r"(?:to=[^\s<]*+\s*+)?+"
    r"(?:<\|constrain\|>\s*+)?+(?:\w++\s*+)?+"
    r"(?:<(?:\|\w*+\|?+)?+)?+"
)
"""A header of which the end is missing."""


class ChannelReader(TurnReader):
    """Messages with headers; the first one may lack `<|start|>assistant`, which ends a prompt."""

    def __init__(
        self,
        tools: ToolSchemas,
        *,
        is_parallel: bool = True,
        has_short_ids: bool = False,
        answer: TurnReader | None = None,
    ) -> None:
        """`answer` reads the content, which is calls if they are forced."""
        super().__init__(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._answer = answer
        self._where: Literal["start", "between", "header", "reasoning", "call", "content"] = "start"
        self._ends: tuple[str, ...] = _ENDS
        """The marks that end the message."""
        self._held_mark = ""
        """The mark that ended content, which is text unless a header follows it."""
        self._name = ""
        """The function of a call that has not begun."""
        self._arguments = ObjectEnd()
        self._has_reasoning = False
        """Whether a message had reasoning, so that another one needs a line of its own."""
        self._is_next_line = False

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
        place, mark = self._first_end()
        if mark is None:
            num_held = 0 if is_end else max(overlap(self._buffer, end) for end in self._ends)
            self._write_body(self._take(len(self._buffer) - num_held))
            if is_end and not self._is_cut_off:
                # The token that ends a call may be missing from the text.
                self._end_call()
            return False
        self._write_body(self._take(place))
        if self._where == "call" and self._arguments.is_in_string:
            self._write_body(self._take(len(mark)))
            return True
        self._end_call()
        if mark != _START:
            self._take(len(mark))
            self._held_mark = mark if self._where == "content" else ""
        self._where = "between"
        return True

    def _begin_message(self, *, is_end: bool) -> bool:
        """Begin a header or content; return whether the text suffices to know which."""
        starts = _FIRST_STARTS if self._where == "start" else _HEADER_STARTS
        begun = self._buffer[:_MAX_BEGIN_LENGTH].lstrip(BLANKS)
        num_blanks = min(len(self._buffer), _MAX_BEGIN_LENGTH) - len(begun)
        if num_blanks <= MAX_BLANKS and not _NO_HEADER.match(begun):
            is_behind = self._where == "between"
            if begun.startswith(starts) and (is_end or begun != _START):
                self._where = "header"
                return True
            if any(one.startswith(begun) for one in starts):
                if not is_end:
                    return False
                if is_behind:
                    # Cut off behind a message, or at the start of a header.
                    self._buffer = ""
                    return False
        self._where, self._ends = "content", _ENDS
        self._write_content(self._take_held_mark())
        if begun.startswith(_START):
            self._write_content(self._take(num_blanks + len(_START)))
        return True

    def _step_header(self, *, is_end: bool) -> bool:
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if not mark:
            if not is_end and len(header) <= _MAX_HEADER_LENGTH:
                return False
            self._buffer = ""
            if not _is_cut(header):
                self._where, self._ends = "content", _ENDS
                self._write_content(self._take_held_mark() + header)
            return False
        self._buffer = rest
        self._held_mark, self._ends = "", _ENDS
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
        if name in self._tools:
            self._where, self._name, self._arguments = "call", name, ObjectEnd()
        elif channel is not None and channel[1] == _ANALYSIS:
            self._where = "reasoning"
            self._is_next_line = self._has_reasoning
            if recipient is None:
                # A grammar applies behind this mark only.
                self._ends = (_END,)
        else:
            self._where = "content"
            if recipient is not None:
                self._write_content(header + mark)
        return True

    def _first_end(self) -> tuple[int, str | None]:
        """Return the place and the mark of the end of a message in the buffer."""
        found = (_REASONING_END if self._ends == (_END,) else _ANY_END).search(self._buffer)
        return (-1, None) if found is None else (found.start(), found[0])

    def _take_held_mark(self) -> str:
        mark, self._held_mark = self._held_mark, ""
        return mark

    def _end_call(self) -> None:
        """Write a call without arguments if none have come."""
        if self._where == "call" and self._name:
            self._begin_call(self._name)
            self._write_arguments("{}")
            self._name = ""

    def _write_body(self, text: str) -> None:
        if self._where == "reasoning":
            if text and self._is_next_line:
                text, self._is_next_line = f"\n{text}", False
            self._has_reasoning = self._has_reasoning or bool(text)
            self._delta.reasoning += text
        elif self._where == "call":
            self._write_call(text)
        else:
            self._write_content(text)

    def _write_call(self, text: str) -> None:
        if self._name:
            text = text.lstrip()
            if not text:
                return
            if text[0] != "{":
                self._where = "content"
                self._write_content(text)
                return
            self._begin_call(self._name)
            self._name = ""
        if not self._arguments.is_closed:
            self._write_arguments(text[: self._arguments.read_object(text)])

    def _write_content(self, text: str) -> None:
        if self._answer is None:
            self._write(text)
        else:
            self._add(self._answer.read_piece(text), self._answer)

    def _add(self, read: TurnDelta, answer: TurnReader) -> None:
        self._delta.calls += read.calls
        self._delta.content += read.content
        self.num_calls = answer.num_calls


def _is_cut(text: str) -> bool:
    """Return whether a text without `<|message|>` is a header of which the end is missing."""
    if len(text) > _MAX_HEADER_LENGTH or _CUT_HEADER.fullmatch(text) is None:
        return False
    return CHANNEL_MARK in text or _START in text


class ChannelTexts:
    """Splits the text of a turn in channels into reasoning and content."""

    def __init__(self) -> None:
        self._reader = ChannelReader({})

    def read_piece(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content that the text completes."""
        read = self._reader.read_piece(text)
        if not is_last:
            return read.reasoning, read.content
        rest = self._reader.flush()
        return read.reasoning + rest.reasoning, read.content + rest.content
