"""Calls that generate text, from their arrival until their requests are submitted."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.calls.embedding_call import EmbeddingCall, EmbeddingOutput
from cluster.serving.calls.generation_call import GenerationCall
from cluster.serving.inputs import GenerationInput
from pagedray.errors import (
    DeadlineError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
    ShuttingDownError,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from cluster.engine.embedding_job import EmbeddingRequest
    from cluster.serving.auth import Authenticator, Tenant
    from cluster.serving.buffers import OutputBuffers
    from cluster.serving.calls.open_calls import OpenCall, OpenCalls
    from cluster.serving.engine_client import EngineClient
    from cluster.serving.inputs import EmbeddingInput, ScoreInput
    from cluster.serving.resume import ResumableStreams
    from cluster.serving.telemetry.call_watch import CallObserver, CallWatch
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.serving.validation.embedding_validator import EmbeddingValidator
    from cluster.serving.validation.score_validator import ScoreValidator
    from cluster.serving.validation.validator import Validator
    from pagedray.model_config import ModelConfig, Task
    from pagedray.request import Request

__all__ = ["CallAdmission", "GenerationCalls", "PoolingCalls"]

_CONTINUED = "The request continues in another call."

_TASK_TEXTS: dict[Task, str] = {
    "generate": "generates text",
    "embed": "only computes embeddings",
    "score": "only scores pairs of texts",
}


class GenerationCalls:
    """Admits calls, and submits their requests to the engine."""

    def __init__(
        self,
        client: EngineClient,
        *,
        tokenizer: Tokenizer,
        validator: Validator,
        admission: CallAdmission,
        calls: OpenCalls,
        observer: CallObserver,
        buffers: OutputBuffers,
        resumables: ResumableStreams,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._validator = validator
        self._admission = admission
        self._calls = calls
        self._observer = observer
        self._buffers = buffers
        self._resumables = resumables

    async def start_generation(
        self, given: GenerationInput, entered: OpenCall | None
    ) -> GenerationCall:
        """Validate a call and submit its requests; the caller closes the returned call.

        `entered` is the call if a frontend has counted it already. Raises RequestError or
        EngineError; then nothing was submitted.
        """
        with self._observer.watched(given.arrival) as watch:
            self._admission.check_task("generate")
            tenant = self._admission.admit(given)
            if given.is_resumable:
                is_http = given.origin.frontend == "http"
                self._resumables.check_allowed(tenant.name, repeats_body=is_http)
                self._resumables.check_room(tenant.name)
            if given.priority < 0 and not tenant.is_admin:
                raise ForbiddenError("A priority below 0 requires the API key of an admin.")
            call = entered or self._calls.enter_call(tenant, is_admitted=given.is_continued)
            try:
                call.begin()
                requests = await self._validator.validate(given)
                return self._open(given, requests, call, watch)
            except BaseException:
                call.close()
                raise

    def _id_of(self, given: GenerationInput, requests: tuple[Request, ...], call: OpenCall) -> str:
        """Return the id of a new call; a call that it continues here ends.

        Raises EngineError if it continues in a call that arrived later.
        """
        continuation = given.continuation
        if continuation is None:
            return requests[0].id if given.client_id is None else given.client_id
        call_id = continuation.call_id if given.client_id is None else given.client_id
        earlier = self._calls.find_call(given.tenant, call_id)
        if earlier is not None and earlier.task is not None:
            # Serve's proxy may send a call again to a replica that was paused the first time, and
            # reads the response to the last sending. Long texts may be validated in another order.
            is_same = earlier.proxied_id == continuation.call_id
            if is_same and call.started_s < earlier.started_s:
                raise EngineError(_CONTINUED)
            if is_same or continuation.cause is not None:
                earlier.task.fail(EngineError(_CONTINUED))
                earlier.release()
        return call_id

    def _open(
        self,
        given: GenerationInput,
        requests: tuple[Request, ...],
        call: OpenCall,
        watch: CallWatch,
    ) -> GenerationCall:
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        num_new_tokens = sum(
            request.sampling.n * request.sampling.max_tokens for request in requests
        )
        watch.note_validated(num_prompt_tokens, requests)
        # Tokenizing took time, in which a drain may have begun.
        self._admission.check_phase()
        if given.client_id is not None:
            self._resumables.check_id(given.tenant, given.client_id)
        call.set_id(self._id_of(given, requests, call))
        if given.continuation is not None:
            call.proxied_id = given.continuation.call_id
        call.reserve_tokens(
            num_prompt_tokens=num_prompt_tokens, num_tokens=num_prompt_tokens + num_new_tokens
        )
        if given.continuation is not None and given.continuation.cause is not None:
            self._observer.metrics.count_continuation(given.continuation.cause)
        weight = call.tenant.weight
        generation = GenerationCall(
            given,
            tuple(msgspec.structs.replace(request, weight=weight) for request in requests),
            call=call,
            watch=watch,
            client=self._client,
            token_bytes=self._tokenizer.token_bytes,
            buffer=self._buffers.open_buffer(call.tenant.name),
        )
        call.task = generation
        continuation = given.continuation
        if call.was_aborted(0.0 if continuation is None else continuation.age_s):
            generation.abort()
        return generation


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


class _Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class CallAdmission:
    """Accepts calls of the model's task from when the model is loaded until a drain begins."""

    def __init__(
        self,
        client: EngineClient,
        model: ModelConfig,
        authenticator: Authenticator,
        buffers: OutputBuffers,
    ) -> None:
        self._client = client
        self._model = model
        self._authenticator = authenticator
        self._buffers = buffers
        self._phase = _Phase.STARTING

    @property
    def is_ready(self) -> bool:
        """Whether calls are accepted."""
        return self._phase is _Phase.READY

    @property
    def has_started(self) -> bool:
        """Whether the model was loaded."""
        return self._phase is not _Phase.STARTING

    def set_ready(self) -> bool:
        """Accept calls; return whether this is new. Has no effect once they are rejected."""
        if self._phase is not _Phase.STARTING:
            return False
        self._phase = _Phase.READY
        return True

    def stop(self) -> None:
        """Reject all calls from now on."""
        self._phase = _Phase.DRAINING

    def check_task(self, task: Task) -> None:
        """Raise InvalidRequestError if the model is for another task."""
        model = self._model
        if task == model.task:
            return
        text = _TASK_TEXTS[model.task]
        if (model.task, task) == ("generate", "embed"):
            text += "; for embeddings its server must be started with --task embed"
        elif (model.task, task) == ("generate", "score"):
            text += "; scores need a cross-encoder, or a reranker served with --task score"
        raise InvalidRequestError(f"The model {model.name} {text}.", param="model")

    def check_phase(self) -> None:
        """Raise EngineError or ShuttingDownError if no calls are accepted."""
        if self._phase is _Phase.STARTING:
            raise EngineError("The model is not loaded yet.")
        if self._phase is _Phase.DRAINING:
            raise ShuttingDownError

    def admit(self, given: GenerationInput | EmbeddingInput | ScoreInput) -> Tenant:
        """Return the tenant of a call. Raises RequestError or EngineError."""
        self.check_phase()
        tenant = self._authenticator.tenant_named(given.tenant)
        if given.deadline_s is not None and time.monotonic() >= given.deadline_s:
            raise DeadlineError("The deadline passed before the request arrived.")
        if not (isinstance(given, GenerationInput) and given.is_continued):
            self._client.engine.check_room(tenant.name, 0)
            self._buffers.check_room(tenant.name)
        return tenant
