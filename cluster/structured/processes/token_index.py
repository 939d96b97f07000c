"""Finds the tokens of a vocabulary by their bytes."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TokenIndex"]


class TokenIndex:
    """The tokens of a vocabulary in the order of their bytes."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """Tokens without bytes are never found."""
        self.tokens = tokens
        self._ids = sorted(
            (one for one, token in enumerate(tokens) if token), key=tokens.__getitem__
        )
        self._sorted = [tokens[one] for one in self._ids]
        self._containing: dict[bytes, tuple[int, ...]] = {}

    def beginning_with(self, text: bytes) -> list[int]:
        """Return the ids of the tokens that begin with a text, itself included."""
        first = last = bisect_left(self._sorted, text)
        while last < len(self._sorted) and self._sorted[last].startswith(text):
            last += 1
        return self._ids[first:last]

    def equal_to(self, text: bytes) -> list[int]:
        """Return the ids of the tokens of exactly this text."""
        return [one for one in self.beginning_with(text) if self.tokens[one] == text]

    def containing(self, text: bytes) -> tuple[int, ...]:
        """Return the ids of the tokens that contain a text, found once for each text."""
        if text not in self._containing:
            self._containing[text] = tuple(
                one for one, token in enumerate(self.tokens) if text in token
            )
        return self._containing[text]
