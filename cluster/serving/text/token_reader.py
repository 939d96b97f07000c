"""Turns token ids of clients into text, in a thread if there are many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.errors import InvalidRequestError
from pagedray.field_checks import check_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.text.text_pool import TextPool
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

__all__ = ["TokenReader"]

_MANY_TOKENS = 1024
"""Token ids from which on detokenizing runs in a thread."""


class TokenReader:
    """Reads token ids that clients send."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, text_pool: TextPool) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._text_pool = text_pool

    async def text_of(
        self, token_ids: Sequence[int], *, tenant: str, skip_special_tokens: bool, param: str
    ) -> str:
        """Return the text of token ids. Raises InvalidRequestError."""
        if len(token_ids) > self._config.max_model_len:
            raise InvalidRequestError(
                f"{param} has {len(token_ids)} token ids, but the context length is "
                f"{self._config.max_model_len}.",
                param=param,
            )
        check_token_ids(token_ids, self._config.model.vocab_size, param)
        decode = self._tokenizer.decode
        if len(token_ids) < _MANY_TOKENS:
            return decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await self._text_pool.run_in_thread(
            tenant, decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    async def strings_of(self, token_ids: Sequence[int], *, tenant: str) -> list[str | None]:
        """Return tokens as the vocabulary spells them; None for an id without a token."""
        read = self._tokenizer.token_strings
        if len(token_ids) < _MANY_TOKENS:
            return read(token_ids)
        return await self._text_pool.run_in_thread(tenant, read, token_ids)
