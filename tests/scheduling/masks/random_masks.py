"""A grammar that allows everything, and whose masks are late or costly at random."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedray.request import FinishReason, Request

__all__ = ["RandomMasks"]

_COSTLY = 0.2
"""How many of the masks are."""
_FREE = 0.1
"""How many of the masks are the last ones of their sequences."""


class _Matcher:
    error = ""
    is_costly = False
    is_free = False
    num_tokens = -1
    """Tokens before the mask that was made last."""


class RandomMasks:
    """Makes each mask at one of the calls that ask for it."""

    num_mask_bytes = 1

    def __init__(self, seed: int = 0) -> None:
        self.lateness = 0.5
        """How many of the masks are not made at a call."""
        self._random = random.Random(seed)

    def matcher(self, request: Request) -> _Matcher:
        return _Matcher()

    def masks(
        self,
        # Any: what `matcher` returns.
        asked: Sequence[tuple[Any, Sequence[int]]],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        return [self._mask(matcher, len(token_ids)) for matcher, token_ids in asked]

    def _mask(self, matcher: _Matcher, num_tokens: int) -> bytes | None:
        if matcher.num_tokens != num_tokens:
            if self._random.random() < self.lateness:
                return None
            matcher.num_tokens = num_tokens
            matcher.is_costly = self._random.random() < _COSTLY
            matcher.is_free = self._random.random() < _FREE
        return b"\xff"
