"""The vocabulary of a model: the bytes of each token, the end tokens, and an index of both."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TokenIndex", "TokenTexts", "Vocabulary", "vocabulary_of"]


class TokenTexts(Protocol):
    """The texts of tokens."""

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a control token."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id without a token."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a model has logits for."""

    tokens: tuple[bytes, ...]
    """Empty for ids without text: control tokens and unused ids."""
    eos_token_ids: tuple[int, ...]
    special_token_ids: dict[str, int]
    """The other control tokens by their texts."""


def vocabulary_of(
    token_bytes: TokenTexts, *, size: int, eos_token_ids: tuple[int, ...]
) -> Vocabulary:
    """Return the vocabulary of a model with `size` logits."""
    return Vocabulary(
        tokens=tuple(
            b""
            if token_bytes.is_special(token_id) or token_id in eos_token_ids
            else token_bytes.bytes_of(token_id)
            for token_id in range(size)
        ),
        special_token_ids={
            token_bytes.bytes_of(token_id).decode(errors="replace"): token_id
            for token_id in range(size)
            if token_bytes.is_special(token_id) and token_id not in eos_token_ids
        },
        eos_token_ids=tuple(token_id for token_id in eos_token_ids if token_id < size),
    )


class TokenIndex:
    """The tokens of a vocabulary in the order of their bytes."""

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Mapping[str, int]) -> None:
        """Tokens without bytes, such as special tokens, are never found."""
        self.tokens = tokens
        self._special = {one: text.encode() for text, one in special_token_ids.items()}
        self._ids = sorted(
            (one for one, token in enumerate(tokens) if token), key=tokens.__getitem__
        )
        self._sorted = [tokens[one] for one in self._ids]
        self._containing: dict[bytes, tuple[int, ...]] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, even of a special token; empty for an end-of-text token."""
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
