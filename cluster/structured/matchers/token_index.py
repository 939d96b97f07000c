"""Finds the tokens of a vocabulary by their bytes."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TokenIndex"]


class TokenIndex:
    """The tokens of a vocabulary in the order of their bytes."""

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Mapping[str, int]) -> None:
        """Tokens without bytes, which special ones are, are never found."""
        self.tokens = tokens
        self._special = {one: text.encode() for text, one in special_token_ids.items()}
        self._ids = sorted(
            (one for one, token in enumerate(tokens) if token), key=tokens.__getitem__
        )
        self._sorted = [tokens[one] for one in self._ids]
        self._containing: dict[bytes, tuple[int, ...]] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, even of a special one; empty for one that ends a text."""
        return self.tokens[token_id] or self._special.get(token_id, b"")

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
