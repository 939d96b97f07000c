"""The interface of matchers, which follow the tokens of a sequence through a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["TextMatcher", "TokenMatcher"]


class TokenMatcher(Protocol):
    """A position in a grammar, or in what surrounds it."""

    @property
    def is_complete(self) -> bool:
        """Whether the tokens so far are a whole text."""

    @property
    def is_free(self) -> bool:
        """Whether it allows every token from here on."""

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token, or return False if it is not allowed."""

    def reset(self) -> None:
        """Return to the start."""

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        """Set the bits of the allowed tokens in a row of zeros, `[num_masks, num_words]`.

        Bit `i % 32` of word `i // 32` is token `i`.
        """


class TextMatcher(TokenMatcher, Protocol):
    """A matcher that also accepts texts."""

    def accept_text(self, text: str) -> bool:
        """Advance by a text, or return False if it is not allowed."""
