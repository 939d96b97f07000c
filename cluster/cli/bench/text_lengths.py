"""Texts of exact lengths in tokens, by a tokenizer here or on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random
    from pathlib import Path

    import tokenizers

__all__ = ["LocalTokenizer", "TextTokenizer", "text_of_length"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD_LENGTHS = (2, 9)
_MAX_ROUNDS = 12


class TextTokenizer(Protocol):
    """Counts the tokens of texts: a `LocalTokenizer`, or the server's client."""

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with special tokens."""

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without added special tokens."""


class LocalTokenizer:
    """The tokenizer of a folder or of a model on the Hub."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> LocalTokenizer:
        """Raises CheckpointError."""
        # The library takes a while to load, for --help too.
        from cluster.serving.text.tokenizer import read_tokenizer

        return cls(read_tokenizer(folder))

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the tokenizer adds."""
        return self._tokenizer.encode(text).ids

    async def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


async def text_of_length(
    tokenizer: TextTokenizer, num_tokens: int, random_words: random.Random
) -> tuple[str, int]:
    """Return a text of random words, and its number of tokens with special tokens.

    That is `num_tokens`, or close to it if no cut of the text gives that many.
    """
    num_special = len(await tokenizer.encode(""))
    wanted = max(num_tokens - num_special, 1)
    # Rarely has a word less than one token.
    text = _words(random_words, wanted)
    best = text, 0
    for _ in range(_MAX_ROUNDS):
        token_ids = await tokenizer.encode(text)
        if abs(len(token_ids) - num_tokens) < abs(best[1] - num_tokens):
            best = text, len(token_ids)
        excess = len(token_ids) - num_tokens
        if excess == 0:
            break
        if excess < 0:
            text += " " + _words(random_words, -excess)
        elif excess > num_tokens:
            # The tail may be longer than the context, so that a server would not decode it.
            text = text[: len(text) * num_tokens // len(token_ids)].rstrip()
        else:
            text = await _cut(tokenizer, text, token_ids, excess)
    return best


async def _cut(tokenizer: TextTokenizer, text: str, token_ids: list[int], excess: int) -> str:
    """Return the text without as many tokens at its end."""
    tail = await tokenizer.decode(token_ids[-excess:])
    # Tokenizers differ in the whitespace and special tokens of decoded texts.
    return text[: max(1, len(text) - max(1, len(tail.strip())))].rstrip()


def _words(random_words: random.Random, number: int) -> str:
    return " ".join(
        "".join(random_words.choices(_LETTERS, k=random_words.randrange(*_WORD_LENGTHS)))
        for _ in range(number)
    )
