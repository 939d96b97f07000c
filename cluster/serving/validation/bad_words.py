"""Converts the texts of `bad_words` to sequences of tokens, as vLLM does."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cluster.serving.validation.prompt_reader import are_long, check_unicode
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import MAX_BAD_WORD_TOKENS
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.text.text_pool import TextPool
    from cluster.serving.text.tokenizer import Tokenizer

__all__ = ["BadWordReader"]

_PARAM = "bad_words"


class BadWordReader:
    """Tokenizes bad words for one model."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, text_pool: TextPool | None = None
    ) -> None:
        """Without a pool, long lists are tokenized in place, which blocks an event loop."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._text_pool = text_pool

    async def read(self, words: Sequence[str], *, tenant: str) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of tokens that a completion must not contain.

        Raises InvalidRequestError, and OverloadedError if too many long texts of the tenant wait.
        """
        for word in words:
            check_unicode(word, _PARAM)
        read_all = partial(self._read_all, words)
        if self._text_pool is not None and are_long(words):
            return await self._text_pool.run_in_thread(tenant, read_all)
        return read_all()

    def _read_all(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            first = self._read(word, word.lstrip())
            spaced = self._read(word, " " + word.lstrip())
            sequences[first] = None
            # Otherwise a prefix of the spaced text, such as the space alone, would be forbidden.
            if spaced[0] != first[0] and len(spaced) == len(first):
                sequences[spaced] = None
        return tuple(sequences)

    def _read(self, word: str, text: str) -> tuple[int, ...]:
        token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if not 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words must contain strings of 1 to {MAX_BAD_WORD_TOKENS} tokens, but "
                f"{quote(word)} has {len(token_ids)}.",
                param=_PARAM,
            )
        if max(token_ids) >= self._vocab_size:
            raise InvalidRequestError(
                f"bad_words contains a text whose token id is {max(token_ids)}, but the ids of the "
                f"model are 0 to {self._vocab_size - 1}.",
                param=_PARAM,
            )
        return token_ids
