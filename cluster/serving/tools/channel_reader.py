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

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import ToolSchemas, TurnDelta

__all__ = ["CHANNEL_MARK", "ChannelReader", "ChannelTexts"]

CHANNEL_MARK = "<|channel|>"
_MESSAGE = "<|message|>"
_START = "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)

_ANALYSIS = "analysis"
_FUNCTIONS = "functions."
_HEADER_STARTS = (CHANNEL_MARK, _START, "to=", _MESSAGE)
_MAX_HEADER_LENGTH = 512
_CHANNEL = re.compile(re.escape(CHANNEL_MARK) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


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
        self._where: Literal["start", "header", "reasoning", "call", "content"] = "start"
        self._name = ""
        """The function of a call that has not begun."""
        self._arguments = ObjectEnd()
        self._has_reasoning = False
        """Whether a message had reasoning, so that another one needs a line of its own."""
        self._is_next_line = False

    def flush(self) -> TurnDelta:
        super().flush()
        if self._answer is not None:
            self._add(self._answer.flush(), self._answer)
        return self._delta

    def _step(self, *, is_end: bool) -> bool:
        if self._where == "start" and not self._is_header(is_end=is_end):
            return False
        if self._where == "header":
            return self._step_header(is_end=is_end)
        place, mark = self._first_end()
        if mark is None:
            num_held = 0 if is_end else max(overlap(self._buffer, end) for end in _ENDS)
            self._write_body(self._take(len(self._buffer) - num_held))
            return False
        self._write_body(self._take(place))
        if self._where == "call" and self._name:
            self._begin_call(self._name)
            self._write_arguments("{}")
        if mark != _START:
            self._take(len(mark))
        self._where = "header"
        return True

    def _is_header(self, *, is_end: bool) -> bool:
        """Return whether the start is certain; without a header all text is content."""
        begun = self._buffer.lstrip()
        if any(begun.startswith(one) for one in _HEADER_STARTS):
            self._where = "header"
            return True
        if not is_end and any(one.startswith(begun) for one in _HEADER_STARTS):
            return False
        self._where = "content"
        return True

    def _step_header(self, *, is_end: bool) -> bool:
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if not mark and not is_end and len(header) <= _MAX_HEADER_LENGTH:
            return False
        if not mark and len(header) <= _MAX_HEADER_LENGTH:
            # The turn was cut off inside of a header.
            self._buffer = ""
            return False
        self._buffer = rest
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
        if name in self._tools:
            self._where, self._name, self._arguments = "call", name, ObjectEnd()
        elif channel is not None and channel[1] == _ANALYSIS:
            self._where = "reasoning"
            self._is_next_line = self._has_reasoning
        else:
            self._where = "content"
            if recipient is not None or not mark:
                self._write_content(header + mark)
        return True

    def _first_end(self) -> tuple[int, str | None]:
        """Return the place and the mark of the end of a message in the buffer."""
        found = [(self._buffer.find(mark), mark) for mark in _ENDS]
        return min(((place, mark) for place, mark in found if place >= 0), default=(-1, None))

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
