"""A reader of turns in channels, as gpt-oss writes them (OpenAI's harmony format).

A turn is messages, each with a header: `analysis` is reasoning, `commentary` to a function is a
call, all else is content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from cluster.serving.text.text_stream import overlap
from cluster.serving.tools.turn_reader import NO_ARGUMENTS, ArgumentsReader
from pagedray.request import MAX_WHITESPACE, WHITESPACE

if TYPE_CHECKING:
    from collections.abc import Collection

    from cluster.serving.tools.turn_reader import ToolSchemas, TurnDelta, TurnReader

__all__ = [
    "ANSWER_HEADER",
    "CHANNEL_MARK",
    "ChannelReader",
    "ChannelTexts",
    "ChannelTokens",
    "call_header",
]

CHANNEL_MARK = "<|channel|>"
MESSAGE_MARK = "<|message|>"
START_MARK = "<|start|>"
END_MARKS = ("<|end|>", "<|call|>", "<|return|>", START_MARK)
"""The marks that end a message; the last mark also begins the next message."""
MAX_HEADER_LENGTH = 512
ANSWER_HEADER = f"{START_MARK}assistant{CHANNEL_MARK}final{MESSAGE_MARK}"
"""The header of an answer, as the model writes it after its reasoning."""
_FUNCTIONS = "functions."
_HEADER_STARTS = (CHANNEL_MARK, START_MARK, MESSAGE_MARK)
_FIRST_STARTS = (*_HEADER_STARTS, "to=")
_MAX_BEGIN_LENGTH = MAX_WHITESPACE + 16
"""Length of the text that shows whether a header begins."""
_CHANNEL = re.compile(re.escape(CHANNEL_MARK) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NO_HEADER = re.compile(re.escape(START_MARK) + r"[^\w<]")
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

_END = re.compile("|".join(map(re.escape, END_MARKS)))
_MAX_END_LENGTH = max(map(len, END_MARKS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The fields of a message's header."""

    kind: Literal["call", "content", "reasoning"]
    function: str = ""
    """The function of a call."""
    has_recipient: bool


def call_header(function: str) -> str:
    """Return the header of a call, as the model writes it."""
    channel = f"{CHANNEL_MARK}commentary to={_FUNCTIONS}{function} <|constrain|>json"
    return f"{START_MARK}assistant{channel}{MESSAGE_MARK}"


def read_header(text: str, tool_names: Collection[str]) -> Header:
    """Return the fields of a header, given its text before `<|message|>`."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
    has_recipient = recipient is not None
    if name in tool_names:
        return Header(kind="call", function=name, has_recipient=has_recipient)
    is_reasoning = channel is not None and channel[1] == "analysis"
    return Header(kind="reasoning" if is_reasoning else "content", has_recipient=has_recipient)


def begins_header(text: str, *, is_first: bool) -> bool | None:
    """Return whether the text where a message may begin is a header; None if undecided."""
    starts = _FIRST_STARTS if is_first else _HEADER_STARTS
    begun = text[:_MAX_BEGIN_LENGTH].lstrip(WHITESPACE)
    num_whitespace = min(len(text), _MAX_BEGIN_LENGTH) - len(begun)
    if num_whitespace > MAX_WHITESPACE or _NO_HEADER.match(begun):
        return False
    if begun.startswith(starts) and begun != START_MARK:
        return True
    return None if any(one.startswith(begun) for one in starts) else False


def is_cut_header(text: str) -> bool:
    """Return whether a text without `<|message|>` is a header of which the end is missing."""
    if len(text) > MAX_HEADER_LENGTH or _CUT_HEADER.fullmatch(text) is None:
        return False
    return CHANNEL_MARK in text or START_MARK in text


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


class ChannelTokens:
    """Follows the tokens of one turn."""

    def __init__(self, tool_names: Collection[str], *, is_open: bool = False) -> None:
        """`is_open` is true if the prompt has begun a message of reasoning."""
        self.num_reasoning = 0
        """Tokens of the reasoning so far, with its marks."""
        self._tool_names = tool_names
        self._is_first = True
        self._is_reasoning = self._is_body = is_open
        self._end = _REASONING_END if is_open else _END
        self._tail = ""
        """A part of a header, or the end of a message that may be a part of a mark."""
        self._sizes: list[int] = []
        """The characters of each token in a header."""

    def add_token(self, token: bytes) -> None:
        """Add a token, which may be special, by its text."""
        # Marks are ASCII, so other characters need not be whole.
        text = token.decode("latin-1")
        self._tail += text
        self._sizes.append(len(text))
        self.num_reasoning += self._is_reasoning
        while self._read_body() if self._is_body else self._read_header():
            pass

    def _read_body(self) -> bool:
        """Return whether the message has ended."""
        found = self._end.search(self._tail)
        if found is None:
            self._tail, self._sizes = self._tail[-_MAX_END_LENGTH:], []
            return False
        # This mark is a part of the next header.
        place = found.start() if found[0] == START_MARK else found.end()
        self._tail = self._tail[place:]
        self._sizes = [len(self._tail)]
        self._is_body = self._is_reasoning = self._is_first = False
        return True

    def _read_header(self) -> bool:
        """Return whether the header has ended, or there is none."""
        is_header = begins_header(self._tail, is_first=self._is_first)
        place = self._tail.find(MESSAGE_MARK) if is_header else -1
        if is_header is None or (is_header and place < 0 and len(self._tail) <= MAX_HEADER_LENGTH):
            return False
        self._is_body, self._end = True, _END
        if place < 0:
            # The mark at which no header begins is text.
            begun = self._tail.lstrip()
            self._tail = begun.removeprefix(START_MARK)
            return True
        header = read_header(self._tail[:place], self._tool_names)
        if header.kind == "reasoning":
            self._is_reasoning = True
            self._end = _END if header.has_recipient else _REASONING_END
            self.num_reasoning += self._num_tokens_from(self._tail.index(CHANNEL_MARK))
        self._tail = self._tail[place + len(MESSAGE_MARK) :]
        return True

    def _num_tokens_from(self, place: int) -> int:
        """Return how many tokens have a part of the header from a place on."""
        end = len(self._tail)
        for number, size in enumerate(reversed(self._sizes)):
            if end <= place:
                return number
            end -= size
        return len(self._sizes)
