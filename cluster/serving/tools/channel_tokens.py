"""Counts the tokens of the reasoning in a turn in channels, which may have several messages of it.

`channel_reader.py` reads the text of such a turn.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cluster.serving.tools.channel_headers import (
    CHANNEL_MARK,
    END_MARKS,
    MAX_HEADER_LENGTH,
    MESSAGE_MARK,
    START_MARK,
    begins_header,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["ChannelTokens"]

_END = re.compile("|".join(map(re.escape, END_MARKS)))
_REASONING_END = re.compile(re.escape(END_MARKS[0]))
_MAX_END_LENGTH = max(map(len, END_MARKS))


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
