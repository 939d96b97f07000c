"""The scheduler's state of a sequence that samples under the masks of a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.request import Matcher

__all__ = ["SequenceMasks"]

_NUM_DEFERRED = 8
"""Tokens of a sequence for whose masks no step waits, after one that was late or costly."""


class SequenceMasks:
    """When a sequence needs masks, and whether steps wait for them."""

    __slots__ = ("is_made", "matcher", "num_deferred", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        """Number of generated tokens after which the sequence samples under masks."""
        self.matcher: Matcher | None = None
        """The state of the sequence in the grammar, from its first mask on."""
        self.num_deferred = 0
        """Tokens that are planned only once their masks are made, since its masks were late."""
        self.is_made = False
        """Whether the mask of the next token is made, if that token is deferred."""

    @property
    def is_awaited(self) -> bool:
        """Whether a step waits for the mask of the next token, or has it."""
        return not self.num_deferred or self.is_made

    def note_made(self, *, is_late: bool) -> None:
        """Note a mask, after which no step waits for the next ones if it was late."""
        if is_late:
            self.num_deferred = _NUM_DEFERRED
        elif self.num_deferred:
            self.num_deferred -= 1
