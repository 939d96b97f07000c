"""A matcher without a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["FreeMatcher"]


class FreeMatcher:
    """Allows every token. A TokenMatcher."""

    is_complete = True
    is_free = True

    def accept_token(self, token_id: int) -> bool:
        """Return True."""
        return True

    def reset(self) -> None:
        """Do nothing."""

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        """Set the bits of all tokens in a row of zeros."""
        masks[row] = -1
