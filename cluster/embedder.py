"""Texts to vectors: an encoder over an executor.

An encoder's texts share nothing with one another and end in the step they begin in, so that all
there is to schedule is how many of them fit a step.
"""

from __future__ import annotations

import logging
import threading
from array import array
from typing import TYPE_CHECKING, get_args

from pagedray.batch import EmbedPlan, Pooling
from pagedray.errors import EngineError, InvalidRequestError, StartupError, WorkerError
from pagedray.request import check_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import tokenizers

    from cluster.executor import Executor
    from pagedray.batch import EmbedOutput
    from pagedray.config import EngineConfig

__all__ = ["Embedder"]

logger = logging.getLogger(__name__)


class Embedder:
    """Runs the texts of one call after another; any thread may call."""

    def __init__(
        self, config: EngineConfig, executor: Executor, tokenizer: tokenizers.Tokenizer
    ) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._vocab_size = config.model.vocab_size
        self._context = config.max_model_len
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._max_num_tokens = config.scheduler.max_num_batched_tokens
        self._hidden_size = config.model.hidden_size
        self._next_step = 0
        self._lock = threading.Lock()

    def embed(
        self, prompts: Sequence[str | Sequence[int]], pooling: Pooling, *, is_normalized: bool
    ) -> list[list[float]]:
        """Return the vector of each prompt, a text or its token ids.

        Raises InvalidRequestError before anything runs, and EngineError if the engine fails.
        """
        if pooling not in get_args(Pooling):
            raise InvalidRequestError(
                f"pooling must be one of {', '.join(get_args(Pooling))}, not {pooling!r:.60}.",
                param="pooling",
            )
        texts = [self._token_ids(prompt) for prompt in prompts]
        vectors: list[list[float]] = [[] for _ in texts]
        for ids in self._steps(texts):
            batch = [texts[i] for i in ids]
            for i, vector in zip(ids, self._run(batch, pooling, is_normalized), strict=True):
                vectors[i] = vector
        return vectors

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return those of a prompt that an encoder can take."""
        if isinstance(prompt, str):
            if not prompt.isascii() and any("\ud800" <= one <= "\udfff" for one in prompt):
                raise InvalidRequestError("prompt holds half of a character.", param="prompt")
            ids = self._tokenizer.encode(prompt).ids
        else:
            check_token_ids(prompt, self._vocab_size, "prompt")
            ids = list(prompt)
        if not 1 <= len(ids) <= self._context:
            raise InvalidRequestError(
                f"prompt has {len(ids)} tokens, but an encoder reads 1 to {self._context}.",
                param="prompt",
            )
        return ids

    def _steps(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield the texts of each step: as many as its token budget holds, or else one.

        Texts of equal length stand side by side, for those are computed as one.
        """
        step: list[int] = []
        num_tokens = 0
        for i in sorted(range(len(texts)), key=lambda i: len(texts[i])):
            num_tokens += len(texts[i])
            if step and (num_tokens > self._max_num_tokens or len(step) == self._max_num_seqs):
                yield step
                step, num_tokens = [], len(texts[i])
            step.append(i)
        if step:
            yield step

    def _run(
        self, token_ids: list[list[int]], pooling: Pooling, is_normalized: bool
    ) -> list[list[float]]:
        with self._lock:
            try:
                output = self._launch(token_ids, pooling, is_normalized)
            except WorkerError as error:
                output = self._run_again(error, token_ids, pooling, is_normalized)
        numbers = array("f", output.vectors).tolist()
        size = self._hidden_size
        return [numbers[first : first + size] for first in range(0, len(numbers), size)]

    def _launch(
        self, token_ids: list[list[int]], pooling: Pooling, is_normalized: bool
    ) -> EmbedOutput:
        plan = EmbedPlan(self._next_step, token_ids, pooling, is_normalized)
        self._next_step += 1
        return self._executor.embed(plan)

    def _run_again(
        self, error: WorkerError, token_ids: list[list[int]], pooling: Pooling, is_normalized: bool
    ) -> EmbedOutput:
        """Return what new ranks make of texts that the old ones died with; only once."""
        logger.warning("%s The ranks are replaced.", error)
        try:
            self._executor.restart()
            self._next_step = 0
            return self._launch(token_ids, pooling, is_normalized)
        except (WorkerError, StartupError) as second:
            raise EngineError(f"The texts could not be embedded: {second}") from second
