"""The marks around a model's reasoning, and where in them the tokens of a sequence are."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

__all__ = [
    "MAX_WHITESPACE",
    "WHITESPACE",
    "AnswerHeader",
    "Reasoning",
    "ReasoningPlace",
    "ReasoningTracker",
]

WHITESPACE = " \t\r\n"
MAX_WHITESPACE = 16
"""Maximum number of whitespace characters before the mark at which reasoning begins."""
_WHITESPACE_BYTES = WHITESPACE.encode()


class AnswerHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of an answer, in models with turns of messages in channels."""

    token_ids: tuple[int, ...]
    text: str = ""
    """The beginning of the structure's text for which it stands, if it chooses among several."""


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How the reasoning of one request begins and ends."""

    begin: str
    """The text at which it begins; a turn that begins otherwise has none."""
    end: str
    """The text at which it ends."""
    mark_tokens: tuple[tuple[int, str], ...] = ()
    """Tokens that are a mark as a whole, or special in it, with their texts."""
    has_special_tokens: bool = False
    """Whether one of these is a special token, which texts usually leave out."""
    answer_headers: tuple[AnswerHeader, ...] = ()
    """Headers of which one follows `end`, in models with turns of messages in channels."""
    num_prompt_tokens: int = 0
    """The first tokens of each header, with which the prompt of such a model ends."""
    is_open: bool = False
    """Whether it begins in the prompt, so that the generated text needs no `begin`."""

    @property
    def has_channels(self) -> bool:
        """Whether turns are messages in channels."""
        return bool(self.answer_headers)


class ReasoningPlace(Enum):
    """How far a sequence has come in its reasoning."""

    START = auto()
    """Only whitespace and a part of `begin` so far: reasoning may begin or not."""
    INSIDE = auto()
    AFTER = auto()
    """The reasoning has ended."""
    ABSENT = auto()
    """The sequence began without reasoning."""


class ReasoningTracker:
    """Follows the tokens of one sequence through its reasoning."""

    def __init__(self, reasoning: Reasoning) -> None:
        self.place = ReasoningPlace.INSIDE if reasoning.is_open else ReasoningPlace.START
        self.rest = b""
        """The missing rest of the mark that comes next, `begin` or `end`, of which a part may be at
        the end of the tokens so far."""
        self.after = b""
        """The bytes after `end` of the token in which it ended."""
        self._begin, self._end = reasoning.begin.encode(), reasoning.end.encode()
        self._mark_tokens = {token_id: text.encode() for token_id, text in reasoning.mark_tokens}
        self._tail = b""
        self._set_rest()

    @property
    def is_passed(self) -> bool:
        """Whether no more reasoning follows."""
        return self.place in (ReasoningPlace.AFTER, ReasoningPlace.ABSENT)

    def add_token(self, token_id: int, token: bytes) -> None:
        """Add a token and its bytes, which may be empty for a special token."""
        if self.is_passed:
            return
        self._tail += self._mark_tokens.get(token_id, token)
        if self.place is ReasoningPlace.START:
            self._begin_or_not()
        if self.place is ReasoningPlace.INSIDE:
            _, found, after = self._tail.partition(self._end)
            if found:
                self.place, self.after, self._tail = ReasoningPlace.AFTER, after, b""
            else:
                self._tail = self._tail[max(0, len(self._tail) - len(self._end) + 1) :]
        self._set_rest()

    def _begin_or_not(self) -> None:
        begun = self._tail.lstrip(_WHITESPACE_BYTES)
        if begun.startswith(self._begin):
            self.place, self._tail = ReasoningPlace.INSIDE, begun[len(self._begin) :]
        elif not self._begin.startswith(begun) or len(self._tail) - len(begun) > MAX_WHITESPACE:
            self.place, self._tail = ReasoningPlace.ABSENT, b""

    def _set_rest(self) -> None:
        if self.place is ReasoningPlace.START:
            self.rest = self._begin[len(self._tail.lstrip(_WHITESPACE_BYTES)) :]
        elif self.place is ReasoningPlace.INSIDE:
            place = self._tail.find(self._end[:1])
            while place >= 0 and not self._end.startswith(self._tail[place:]):
                place = self._tail.find(self._end[:1], place + 1)
            self.rest = self._end if place < 0 else self._end[len(self._tail) - place :]
