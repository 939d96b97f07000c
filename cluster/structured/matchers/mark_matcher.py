"""A grammar whose text may begin with a special token, which stands for a part of the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cluster.structured.matchers.token_matcher import TextMatcher

__all__ = ["MarkMatcher"]


class MarkMatcher:
    """Allows the token at the start of the grammar only. A TextMatcher."""

    def __init__(self, matcher: TextMatcher, token_id: int, text: str) -> None:
        """The token stands for `text`, with which a text of the grammar must begin."""
        self._matcher = matcher
        self._token_id = token_id
        self._text = text
        self._is_at_start = True

    @property
    def is_complete(self) -> bool:
        """Whether the grammar matches the tokens so far."""
        return self._matcher.is_complete

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token, or return False if the grammar does not allow it."""
        was_at_start, self._is_at_start = self._is_at_start, False
        if was_at_start and token_id == self._token_id:
            return self._matcher.accept_text(self._text)
        return self._matcher.accept_token(token_id)

    def accept_text(self, text: str) -> bool:
        """Advance by a text, or return False if the grammar does not allow it."""
        self._is_at_start = False
        return self._matcher.accept_text(text)

    def reset(self) -> None:
        """Return to the start of the grammar."""
        self._matcher.reset()
        self._is_at_start = True

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        """Set the bits of the allowed tokens in a row of zeros."""
        self._matcher.write_mask(masks, row)
        if self._is_at_start:
            word, bit = divmod(self._token_id, 32)
            masks.view("uint32")[row, word] |= 1 << bit
