"""An incremental parser of the reasoning at the beginning of a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.text.marks import overlap
from pagedray.reasoning import MAX_WHITESPACE, WHITESPACE, ReasoningPlace

if TYPE_CHECKING:
    from pagedray.reasoning import Reasoning

__all__ = ["ReasoningReader"]


class ReasoningReader:
    """Splits the text of a turn into reasoning and the rest.

    Whitespace around the reasoning belongs to neither. Text is held back only while it may be a
    part of a mark.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self.place = ReasoningPlace.INSIDE if reasoning.is_open else ReasoningPlace.START
        self._begin, self._end = reasoning.begin, reasoning.end
        self._buffer = ""
        self._held_whitespace = ""
        self._may_begin = True
        """Whether all that was read may be a part of the mark at the beginning."""
        self._has_text = False
        """Whether there was reasoning that is not blank."""
        self._has_rest = False
        """Whether anything followed the reasoning that is not blank."""

    @property
    def is_passed(self) -> bool:
        """Whether all text that follows is returned as it is."""
        return self._has_rest

    def read_piece(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the reasoning that the text completes, and the text after all reasoning."""
        if self._has_rest:
            return "", text
        self._buffer += text
        if self._may_begin:
            self._begin_or_not(is_last=is_last)
        found = self._inside(is_last=is_last) if self._is_inside else ""
        return found, self._behind()

    @property
    def _is_inside(self) -> bool:
        return self.place is ReasoningPlace.INSIDE and not self._may_begin

    def _begin_or_not(self, *, is_last: bool) -> None:
        begun = self._buffer.lstrip(WHITESPACE)
        num_whitespace = len(self._buffer) - len(begun)
        if begun.startswith(self._begin) and num_whitespace <= MAX_WHITESPACE:
            self.place, self._may_begin = ReasoningPlace.INSIDE, False
            self._buffer = begun[len(self._begin) :]
        elif is_last or num_whitespace > MAX_WHITESPACE or not self._begin.startswith(begun):
            self._may_begin = False
            if self.place is ReasoningPlace.START:
                self.place = ReasoningPlace.ABSENT

    def _inside(self, *, is_last: bool) -> str:
        before, mark, after = self._buffer.partition(self._end)
        if mark:
            self.place, self._buffer = ReasoningPlace.AFTER, after
            return self._written(before)
        num_held = 0 if is_last else overlap(self._buffer, self._end)
        length = len(self._buffer) - num_held
        before, self._buffer = self._buffer[:length], self._buffer[length:]
        return self._written(before)

    def _written(self, text: str) -> str:
        """Return reasoning without the whitespace around it."""
        if not self._has_text:
            text = text.lstrip(WHITESPACE)
        kept = text.rstrip(WHITESPACE)
        if not kept:
            self._held_whitespace += text
            return ""
        self._has_text = True
        written = self._held_whitespace + kept
        self._held_whitespace = text[len(kept) :]
        return written

    def _behind(self) -> str:
        if self.place is ReasoningPlace.AFTER:
            self._buffer = self._buffer.lstrip(WHITESPACE)
        elif self.place is not ReasoningPlace.ABSENT:
            return ""
        text, self._buffer = self._buffer, ""
        self._has_rest = bool(text)
        return text
