"""What grammars must know of a tokenizer: the bytes of each token, and which ones end a text."""

from __future__ import annotations

from typing import Protocol

import msgspec

__all__ = ["TokenTexts", "Vocabulary", "vocabulary_of"]


class TokenTexts(Protocol):
    """What tokens stand for."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is control, not text."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id without a token."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a model has logits for."""

    tokens: tuple[bytes, ...]
    """Nothing where an id has no text: control tokens, and ids that no token has."""
    eos_token_ids: tuple[int, ...]


def vocabulary_of(
    token_bytes: TokenTexts, *, size: int, eos_token_ids: tuple[int, ...]
) -> Vocabulary:
    """Return the vocabulary of a model of so many logits."""
    return Vocabulary(
        tokens=tuple(
            b""
            if token_bytes.is_special(token_id) or token_id in eos_token_ids
            else token_bytes.bytes_of(token_id)
            for token_id in range(size)
        ),
        eos_token_ids=tuple(token_id for token_id in eos_token_ids if token_id < size),
    )
