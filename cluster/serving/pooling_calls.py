"""Calls of models that embed or score texts, from their arrival to their vectors."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.serving.calls.embedding_call import EmbeddingCall, EmbeddingOutput

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from cluster.engine.embedding_job import EmbeddingRequest
    from cluster.serving.call_admission import CallAdmission
    from cluster.serving.calls.open_calls import OpenCall, OpenCalls
    from cluster.serving.engine_client import EngineClient
    from cluster.serving.inputs import EmbeddingInput, ScoreInput
    from cluster.serving.telemetry.call_watch import CallObserver
    from cluster.serving.validation.embedding_validator import EmbeddingValidator
    from cluster.serving.validation.score_validator import ScoreValidator
    from pagedray.model_config import Task

__all__ = ["PoolingCalls"]


class PoolingCalls:
    """Admits calls, and submits their texts to the engine."""

    def __init__(
        self,
        client: EngineClient,
        *,
        embeddings: EmbeddingValidator,
        scores: ScoreValidator,
        admission: CallAdmission,
        calls: OpenCalls,
        observer: CallObserver,
    ) -> None:
        self._client = client
        self._embeddings = embeddings
        self._scores = scores
        self._admission = admission
        self._calls = calls
        self._observer = observer

    async def embed(self, given: EmbeddingInput, entered: OpenCall | None) -> EmbeddingOutput:
        """Return the vectors of texts; cancelling the wait cancels the call.

        `entered` is the call if a frontend has counted it already. Raises RequestError or
        EngineError.
        """
        return await self._run_call("embed", given, self._embeddings.validate(given), entered)

    async def score(self, given: ScoreInput, entered: OpenCall | None) -> EmbeddingOutput:
        """Return the scores of pairs of texts as vectors of one number.

        Otherwise as `embed`.
        """
        return await self._run_call("score", given, self._scores.validate(given), entered)

    async def _run_call(
        self,
        task: Task,
        given: EmbeddingInput | ScoreInput,
        validating: Coroutine[None, None, EmbeddingRequest],
        entered: OpenCall | None,
    ) -> EmbeddingOutput:
        # A call may be rejected before its validation begins.
        with closing(validating), self._observer.watched(given.arrival) as watch:
            self._admission.check_task(task)
            tenant = self._admission.admit(given)
            call = entered or self._calls.enter_call(tenant)
            try:
                call.begin()
                request = await validating
                num_tokens = request.num_tokens
                watch.note_validated(num_tokens)
                call.reserve_tokens(num_prompt_tokens=num_tokens, num_tokens=num_tokens)
                # Tokenizing took time, in which a drain may have begun.
                self._admission.check_phase()
                request = replace(request, weight=tenant.weight)
                call.task = embedding = EmbeddingCall(
                    self._client.embedding_engine.submit_request(request)
                )
                watch.note_open("")
                vectors = await embedding.vectors(given.deadline_s)
                watch.note_end("stop")
                return EmbeddingOutput(vectors=vectors, num_prompt_tokens=num_tokens)
            finally:
                call.close()
