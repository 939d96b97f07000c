"""The validator of scoring calls: it turns a client's input into a request or rejects it."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import TYPE_CHECKING

from cluster.engine.embedding_scheduler import EmbeddingRequest
from cluster.serving.inputs import check_model_name
from cluster.serving.validation.prompt_reader import (
    DEFAULT_INSTRUCTION,
    PromptReader,
    are_long,
    warn_of_unknown_tokens,
)
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from cluster.serving.inputs import ScoreInput
    from cluster.serving.text.text_pool import TextPool
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

__all__ = ["MAX_PAIRS", "ScoreValidator"]

MAX_PAIRS = 2048
"""Maximum number of pairs in a call."""
_MAX_INSTRUCTION = 4096


class ScoreValidator:
    """Checks pairs of texts against the limits of one model that scores, and tokenizes them."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, *, text_pool: TextPool | None = None
    ) -> None:
        if config.model.task == "score":
            warn_of_unknown_tokens(config, tokenizer)
        self._reader = PromptReader(config, tokenizer, text_pool=text_pool)
        self._model = config.model
        self._context = config.max_model_len
        self._is_decoder = not config.model.is_encoder
        self._answers = config.model.score_head == "answer"
        self._num_types = config.model.num_token_types

    async def validate(self, given: ScoreInput) -> EmbeddingRequest:
        """Return the request; its vectors are the scores. Raises RequestError."""
        check_model_name(given.model, self._model)
        _, name = given.params
        if not 1 <= len(given.pairs) <= MAX_PAIRS:
            raise InvalidRequestError(
                f"{name} must have 1 to {MAX_PAIRS} texts, not {len(given.pairs)}.", param=name
            )
        for side, param in zip(zip(*given.pairs, strict=True), given.params, strict=True):
            if not all(side):
                raise InvalidRequestError(f"{param} must not have an empty text.", param=param)
        instruction = self._instruction(given)
        is_long = are_long(chain.from_iterable(given.pairs))
        texts: list[tuple[int, ...]] = []
        num_first_type: list[int] = []
        for pair in given.pairs:
            if self._answers:
                token_ids = await self._reader.read_question(
                    pair, instruction, is_long=is_long, tenant=given.tenant, params=given.params
                )
            else:
                token_ids, num_first = await self._reader.read_pair(
                    pair, is_long=is_long, tenant=given.tenant, params=given.params
                )
                num_first_type.append(num_first)
            if len(token_ids) > self._context:
                raise InvalidRequestError(
                    f"{given.params[0]} and an entry of {name} may have at most {self._context} "
                    f"tokens together, not {len(token_ids)}.",
                    param=name,
                )
            texts.append(token_ids)
            # Let other calls run between the texts of a long list.
            await asyncio.sleep(0)
        return EmbeddingRequest(
            texts=tuple(texts),
            # Only the last token of a decoder attends to all others.
            pooling="last" if self._is_decoder else "cls",
            is_normalized=False,
            size=1,
            # A RoBERTa has one type only, and decoders have none.
            num_first_type=tuple(num_first_type) if self._num_types > 1 else (),
            tenant=given.tenant,
            deadline_s=given.deadline_s,
        )

    def _instruction(self, given: ScoreInput) -> str:
        if given.instruction is None:
            return DEFAULT_INSTRUCTION
        if not self._answers:
            raise InvalidRequestError(
                "instruction requires a reranker whose prompt contains it, such as "
                f"Qwen3-Reranker; {self._model.name} scores texts without an instruction.",
                param="instruction",
            )
        if not 1 <= len(given.instruction) <= _MAX_INSTRUCTION:
            raise InvalidRequestError(
                f"instruction must have 1 to {_MAX_INSTRUCTION} characters, not "
                f"{len(given.instruction)}.",
                param="instruction",
            )
        return given.instruction
