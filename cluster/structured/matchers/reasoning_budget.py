"""Ends the model's reasoning when it has too many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.reasoning import ReasoningPlace, ReasoningTracker

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cluster.structured.matchers.token_index import TokenIndex
    from cluster.structured.matchers.token_matcher import TokenMatcher
    from pagedray.reasoning import Reasoning

__all__ = ["ReasoningBudget"]


class ReasoningBudget:
    """Allows what another matcher allows, until the reasoning has as many tokens as it may have.

    From then on, only the mark of its end is allowed. It is a TokenMatcher.
    """

    def __init__(
        self, matcher: TokenMatcher, reasoning: Reasoning, index: TokenIndex, *, max_tokens: int
    ) -> None:
        self._matcher = matcher
        self._reasoning = reasoning
        self._index = index
        self._max_tokens = max_tokens
        self._begin()

    def _begin(self) -> None:
        self._tracker = ReasoningTracker(self._reasoning)
        self._num_tokens = 0
        """Tokens of the reasoning, without the mark at which it begins."""

    @property
    def is_complete(self) -> bool:
        """Whether the tokens so far are a whole text."""
        return self._matcher.is_complete

    @property
    def is_free(self) -> bool:
        """Whether no more reasoning follows, and the other matcher allows every token."""
        return self._tracker.is_passed and self._matcher.is_free

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token, or return False if it is not allowed."""
        if self._tracker.place is ReasoningPlace.INSIDE:
            self._num_tokens += 1
        self._tracker.add_token(token_id, self._index.bytes_of(token_id))
        return self._matcher.accept_token(token_id)

    def reset(self) -> None:
        """Return to the start of the turn."""
        self._matcher.reset()
        self._begin()

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        """Set the bits of the allowed tokens in a row of zeros."""
        is_inside = self._tracker.place is ReasoningPlace.INSIDE
        if is_inside and self._num_tokens >= self._max_tokens:
            word, bit = divmod(self._next_of_end(), 32)
            masks.view("uint32")[row, word] = 1 << bit
            return
        self._matcher.write_mask(masks, row)

    def _next_of_end(self) -> int:
        """Return the token of the mark at which the reasoning ends, or the longest one of it."""
        for token_id, text in self._reasoning.mark_tokens:
            # Models know the end by this token, even if the reasoning ends like a part of it.
            if text == self._reasoning.end:
                return token_id
        rest = self._tracker.rest
        for length in range(len(rest), 0, -1):
            found = self._index.equal_to(rest[:length])
            if found:
                return found[0]
        raise RuntimeError("no token continues the mark at the end of the reasoning")
