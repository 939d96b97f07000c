"""The vocabulary that grammars are compiled for: the bytes of each token, and the end tokens."""

from typing import Protocol

import msgspec

__all__ = ["TokenTexts", "Vocabulary", "vocabulary_of"]


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
