"""A grammar whose text may contain a special token once, which stands for a part of the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cluster.structured.matchers.token_index import TokenIndex
    from cluster.structured.matchers.token_matcher import TextMatcher

__all__ = ["MarkMatcher"]


class MarkMatcher:
    """Allows the token at the start of the grammar, or after free text. A TextMatcher."""

    def __init__(
        self,
        matcher: TextMatcher,
        token_id: int,
        text: str,
        *,
        text_index: TokenIndex | None = None,
    ) -> None:
        """The token stands for `text`, with which a text of the grammar must begin.

        With `text_index`, free text may precede it, whose tokens the index knows.
        """
        self._matcher = matcher
        self._token_id = token_id
        self._text = text
        self._mark = text.encode()
        self._index = text_index
        self._is_expected = True
        """Whether the token may come next."""
        self._tail = b""
        """The end of the free text."""

    @property
    def is_complete(self) -> bool:
        """Whether the grammar matches the tokens so far."""
        return self._matcher.is_complete

    @property
    def is_free(self) -> bool:
        """Return False: the grammar may forbid tokens."""
        return False

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token, or return False if the grammar does not allow it."""
        if self._is_expected and token_id == self._token_id:
            self._is_expected = False
            return self._matcher.accept_text(self._text)
        self._is_expected = self._is_expected and self._continues_text(token_id)
        return self._matcher.accept_token(token_id)

    def accept_text(self, text: str) -> bool:
        """Advance by a text, or return False if the grammar does not allow it."""
        self._is_expected = False
        return self._matcher.accept_text(text)

    def reset(self) -> None:
        """Return to the start of the grammar."""
        self._matcher.reset()
        self._is_expected = True
        self._tail = b""

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        """Set the bits of the allowed tokens in a row of zeros."""
        self._matcher.write_mask(masks, row)
        if self._is_expected:
            word, bit = divmod(self._token_id, 32)
            masks.view("uint32")[row, word] |= 1 << bit

    def _continues_text(self, token_id: int) -> bool:
        """Add a token to the free text, and return whether the text has not reached the mark."""
        if self._index is None:
            return False
        text = self._tail + self._index.bytes_of(token_id)
        self._tail = text[-len(self._mark) :]
        return self._mark not in text
