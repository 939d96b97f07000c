"""The servicer behind every frontend: it validates requests and returns text and vectors.

It knows no protocol. Frontends translate its outputs and errors into theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.serving.auth import Authenticator
from cluster.serving.embedding_validator import EmbeddingValidator, ScoreValidator
from cluster.serving.generation_call import GenerationCall, GenerationOutput, Usage
from cluster.serving.inputs import MAX_CLIENT_ID_LENGTH, CallOptions, GenerationInput
from cluster.serving.intake import Intake, MemoryTrimmer, OutputBuffers
from cluster.serving.open_calls import OpenCall, OpenCalls
from cluster.serving.resume import ResumableStreams
from cluster.serving.server_info import own_loads, server_info, server_loads
from cluster.serving.telemetry.call_log import RejectedCalls, log_call
from cluster.serving.telemetry.call_watch import CallObserver
from cluster.serving.telemetry.load_history import LoadRecorder
from cluster.serving.telemetry.log_lines import IgnoredParameters
from cluster.serving.telemetry.metrics import Metrics
from cluster.serving.text.text_pool import TextPool
from cluster.serving.tools.tool_calls import detect_format
from cluster.serving.validator import Validator
from pagedray.errors import (
    AuthenticationError,
    DeadlineError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
    OverloadedError,
    PagedRayError,
    ShuttingDownError,
    invalid_field,
)
from pagedray.field_checks import check_token_ids

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from concurrent.futures import Future

    from cluster.engine.embedding_scheduler import EmbeddingRequest
    from cluster.serving.auth import Tenant
    from cluster.serving.engine_client import EngineClient
    from cluster.serving.inputs import Arrival, EmbeddingInput, Frontend, ScoreInput, TokenizeInput
    from cluster.serving.server_info import ServerInfo, ServerLoads
    from cluster.serving.telemetry.call_watch import CallWatch
    from cluster.serving.telemetry.load_history import LoadHistory
    from cluster.serving.telemetry.tracing import Tracer
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig
    from pagedray.model_config import Task
    from pagedray.request import Request

__all__ = ["EmbeddingOutput", "GenerationCall", "GenerationOutput", "Servicer", "Usage"]

_IDLE_POLL_S = 0.02
_MANY_TOKENS = 1024
"""Token ids from which on detokenizing runs in a thread."""
_CONTINUED = "The request continues in another call."
_TASK_TEXTS: dict[Task, str] = {
    "generate": "generates text",
    "embed": "only computes embeddings",
    "score": "only scores pairs of texts",
}


class _Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Servicer:
    """Starts and tracks the calls of every frontend. Used from the event loop only."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        config: EngineConfig,
        options: CallOptions | None = None,
        *,
        text_pool: TextPool | None = None,
        tracer: Tracer | None = None,
        authenticator: Authenticator | None = None,
    ) -> None:
        """Long texts are tokenized in `text_pool`, which the servicer closes.

        Without an `authenticator` no key is required.
        """
        options = CallOptions() if options is None else options
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.reader_limits = options.reader_limits
        self.authenticator = Authenticator() if authenticator is None else authenticator
        if self.authenticator.requires_keys:
            tokenizer.disable_cache()
        self._phase = _Phase.STARTING
        self._calls = OpenCalls()
        self._text_pool = TextPool() if text_pool is None else text_pool
        self.metrics = Metrics(client, config)
        self.ignored = IgnoredParameters(
            self.metrics.count_ignored, is_strict=options.strict_parameters
        )
        """Ignored parameters of HTTP clients."""
        self.rejected_calls = RejectedCalls()
        """Logs the calls that frontends reject."""
        self._recorder = LoadRecorder(self.metrics.times.between_tokens)
        listeners = [log_call] if tracer is None else [tracer.trace, log_call]
        self.observer = CallObserver(self.metrics, self._recorder, config.model.name, listeners)
        self.validator = Validator(
            config,
            tokenizer,
            text_pool=self._text_pool,
            reasoning_format=options.reasoning_format,
            note_compile=self.metrics.times.observe_compile,
        )
        self._embeddings = EmbeddingValidator(config, tokenizer, text_pool=self._text_pool)
        self._scores = ScoreValidator(config, tokenizer, text_pool=self._text_pool)
        self.tool_format = options.tool_format or detect_format(tokenizer.template_source)
        """How the model writes tool calls; None if unknown."""
        trimmer = MemoryTrimmer()
        self.intake = Intake(config, options.intake_limits, note_freed=trimmer.note_freed)
        self.buffers = OutputBuffers(
            options.reader_limits.unread_buffer, note_freed=trimmer.note_freed
        )
        """The output that clients have not read."""
        self.resumables = ResumableStreams(options.reader_limits)
        """The streams that clients may resume."""
        self.metrics.follow_readers(
            num_unread_bytes=lambda: self.buffers.num_bytes,
            num_streams=lambda: len(self.resumables),
            num_stream_bytes=lambda: self.resumables.num_bytes,
        )
        self._started_s = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether the model was loaded and the engine has not failed permanently."""
        return self._phase is not _Phase.STARTING and not self.client.has_failed

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted and the engine makes progress."""
        return self._phase is _Phase.READY and self.client.is_healthy

    @property
    def num_open_calls(self) -> int:
        """Number of calls that have not ended."""
        return len(self._calls)

    def num_calls_of(self, tenant: Tenant) -> int:
        """Return the number of open calls of a tenant, or of all for an admin."""
        return self._calls.count(tenant)

    def warm_up(self) -> None:
        """Start slow preparations that do not need the model, and return immediately."""
        if not self.config.model.pools:
            self.validator.warm_up()

    def set_ready(self) -> None:
        """Accept calls, unless a drain has begun."""
        if self._phase is _Phase.STARTING:
            self._phase = _Phase.READY
            self._recorder.start_sampling(lambda: self.client.engine.stats(), self._uptime_s)

    def stop_accepting(self) -> None:
        """Accept no more requests, and report not ready.

        Calls that wait for a compilation are rejected at once: it may take as long as the drain.
        """
        self._phase = _Phase.DRAINING
        self.validator.stop_accepting()

    async def drain(self, grace_s: float) -> None:
        """Accept no more requests, and end requests that run longer than `grace_s`."""
        self.stop_accepting()
        deadline_s = time.monotonic() + grace_s
        while (len(self._calls) or self.resumables.num_awaited) and time.monotonic() < deadline_s:
            await asyncio.sleep(_IDLE_POLL_S)
        for call in self._calls:
            if call.task is not None:
                call.task.fail(EngineError("The server shut down before the request was finished."))

    async def close(self) -> None:
        """End the text threads and the structure compiler; nothing can be validated afterwards."""
        self._recorder.stop_sampling()
        self.resumables.close()
        self.intake.close()
        await self._text_pool.close()
        await asyncio.to_thread(self.validator.close)

    def authenticate(self, authorization: str | None) -> Tenant:
        """Return the tenant of an Authorization header, `Bearer KEY`; ANONYMOUS without a key file.

        Raises AuthenticationError.
        """
        return self.authenticator.authenticate(authorization)

    def enter_call(self, tenant: Tenant, *, uses_engine: bool, is_continued: bool) -> OpenCall:
        """Return a call, which counts from here on, for `start_generation` and its like.

        Raises OverloadedError while the tenant is at its limit or the queue of the engine is full;
        the caller passes it to `note_rejected`. Frontends call it before they read a message, so
        that an overloaded server spends little on rejected calls. A server that is not ready is
        reported by `start_generation` and `embed`.
        """
        # A call that resumes a stream needs no room; others are rejected later.
        may_resume = self.resumables.has_streams(tenant.name)
        needs_room = uses_engine and not is_continued and not may_resume
        if needs_room and self._phase is _Phase.READY:
            self.client.engine.check_room(tenant.name, 0)
            self.buffers.check_room(tenant.name)
        return self._calls.enter_call(tenant, is_admitted=is_continued, may_resume=may_resume)

    async def delay_rejection(self, error: Exception) -> None:
        """Wait before a call is rejected for lack of a key or of room, if any call is open."""
        if isinstance(error, AuthenticationError | OverloadedError):
            await self._calls.delay_rejection()

    def note_rejected(
        self, error: OverloadedError, arrival: Arrival | None, frontend: Frontend
    ) -> None:
        """Count a call that may not enter; a call of the engine has an `arrival`."""
        if arrival is None:
            self.metrics.count_rejection(error, frontend)
        else:
            self.observer.watch_call(arrival).note_end(error)

    async def start_generation(
        self, given: GenerationInput, entered: OpenCall | None = None
    ) -> GenerationCall:
        """Validate a call and submit its requests; the caller closes the returned call.

        `entered` is the call if a frontend has counted it already. Raises RequestError or
        EngineError; then nothing was submitted.
        """
        with self.observer.watched(given.arrival) as watch:
            self._check_task("generate")
            tenant = self._admit(given)
            if given.is_resumable:
                is_http = given.origin.frontend == "http"
                self.resumables.check_allowed(tenant.name, repeats_body=is_http)
                self.resumables.check_room(tenant.name)
            if given.priority < 0 and not tenant.is_admin:
                raise ForbiddenError("A priority below 0 requires the API key of an admin.")
            call = entered or self._calls.enter_call(tenant, is_admitted=given.is_continued)
            try:
                call.begin()
                requests = await self.validator.read_requests(given)
                if self.validator.needs_grammar(requests):
                    # Other processes compile it, for seconds; the tenant's other calls go on.
                    call.end_turn()
                    requests = await self.validator.with_grammar(requests, tenant=given.tenant)
                    await call.take_turn()
                generation = self._open(given, requests, call, watch)
                call.end_turn()
                return generation
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
        self._check_phase()
        if given.client_id is not None:
            self.resumables.check_id(given.tenant, given.client_id)
        call.set_id(self._id_of(given, requests, call))
        if given.continuation is not None:
            call.proxied_id = given.continuation.call_id
        call.reserve_tokens(
            num_prompt_tokens=num_prompt_tokens, num_tokens=num_prompt_tokens + num_new_tokens
        )
        if given.continuation is not None and given.continuation.cause is not None:
            self.metrics.count_continuation(given.continuation.cause)
        weight = call.tenant.weight
        generation = GenerationCall(
            given,
            tuple(msgspec.structs.replace(request, weight=weight) for request in requests),
            call=call,
            watch=watch,
            client=self.client,
            token_bytes=self.tokenizer.token_bytes,
            buffer=self.buffers.open_buffer(call.tenant.name),
        )
        call.task = generation
        continuation = given.continuation
        if call.was_aborted(0.0 if continuation is None else continuation.age_s):
            generation.abort()
        return generation

    async def embed(
        self, given: EmbeddingInput, entered: OpenCall | None = None
    ) -> EmbeddingOutput:
        """Return the vectors of texts; cancelling the wait cancels the call.

        `entered` is the call if a frontend has counted it already. Raises RequestError or
        EngineError.
        """
        return await self._run_call("embed", given, self._embeddings.validate(given), entered)

    async def score(self, given: ScoreInput, entered: OpenCall | None = None) -> EmbeddingOutput:
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
        with closing(validating), self.observer.watched(given.arrival) as watch:
            self._check_task(task)
            tenant = self._admit(given)
            call = entered or self._calls.enter_call(tenant)
            try:
                call.begin()
                request = await validating
                num_tokens = request.num_tokens
                watch.note_validated(num_tokens)
                call.reserve_tokens(num_prompt_tokens=num_tokens, num_tokens=num_tokens)
                # Tokenizing took time, in which a drain may have begun.
                self._check_phase()
                request = replace(request, weight=tenant.weight)
                call.task = embedding = EmbeddingCall(self.client.engine.submit_texts(request))
                call.end_turn()
                watch.note_open("")
                vectors = await embedding.vectors(given.deadline_s)
                watch.note_end("stop")
                return EmbeddingOutput(vectors=vectors, num_prompt_tokens=num_tokens)
            finally:
                call.close()

    async def tokenize(self, given: TokenizeInput) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation. Raises RequestError."""
        return await self.validator.tokenize(given)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        tenant: str = "",
        skip_special_tokens: bool = True,
        model: str | None = None,
        param: str = "token_ids",
    ) -> str:
        """Return the text of token ids, which are the client's `param`. Raises RequestError."""
        self.validator.check_model(model)
        context = self.config.max_model_len
        if len(token_ids) > context:
            raise invalid_field(
                param, f"has {len(token_ids)} token ids, but the context length is {context}."
            )
        check_token_ids(token_ids, self.config.model.vocab_size, param)
        decode = partial(self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        if len(token_ids) < _MANY_TOKENS:
            return decode()
        return await self._text_pool.run_in_thread(tenant, decode)

    async def token_strings(self, token_ids: Sequence[int], *, tenant: str) -> list[str | None]:
        """Return tokens of a prompt as the vocabulary spells them; None for an unknown id."""
        read = self.tokenizer.token_strings
        if len(token_ids) < _MANY_TOKENS:
            return read(token_ids)
        return await self._text_pool.run_in_thread(tenant, read, token_ids)

    def abort_call(self, tenant_name: str, client_id: str) -> None:
        """Abort a tenant's call by its id, and forget its stream.

        A call that has its id here only later is aborted then, such as a call that continues here
        after its replica failed.
        """
        self.resumables.end_stream(tenant_name, client_id)
        call = self._calls.find_call(tenant_name, client_id)
        if call is not None and call.task is not None:
            call.task.abort()
            if call.proxied_id:
                # The proxy may send it again.
                self._calls.note_abort(tenant_name, call.proxied_id)
        if len(client_id) <= MAX_CLIENT_ID_LENGTH:
            self._calls.note_abort(tenant_name, client_id)

    def info(self) -> ServerInfo:
        """Return the server's static properties. Raises EngineError before the model is loaded."""
        return server_info(self.config, self.client.engine.stats())

    def loads(self, tenant: Tenant) -> ServerLoads:
        """Return the current loads, restricted to the tenant's view.

        Raises EngineError before the model is loaded.
        """
        loads = server_loads(
            self.client.engine.stats(),
            is_ready=self.is_ready,
            uptime_s=self._uptime_s(),
            calls=self._calls.infos(tenant),
        )
        return loads if tenant.is_admin else own_loads(loads)

    def load_history(self) -> LoadHistory:
        """Return the load of all tenants in the last ten minutes, for admins."""
        return self._recorder.history()

    def _check_task(self, task: Task) -> None:
        """Raise InvalidRequestError if the model is for another task."""
        model = self.config.model
        if task == model.task:
            return
        text = _TASK_TEXTS[model.task]
        if (model.task, task) == ("generate", "embed"):
            text += "; for embeddings its server must be started with --task embed"
        elif (model.task, task) == ("generate", "score"):
            text += "; scores need a cross-encoder, or a reranker served with --task score"
        raise InvalidRequestError(f"The model {model.name} {text}.", param="model")

    def _check_phase(self) -> None:
        """Raise EngineError or ShuttingDownError if no calls are accepted."""
        if self._phase is _Phase.STARTING:
            raise EngineError("The model is not loaded yet.")
        if self._phase is _Phase.DRAINING:
            raise ShuttingDownError

    def _admit(self, given: GenerationInput | EmbeddingInput | ScoreInput) -> Tenant:
        """Return the tenant of a call. Raises RequestError or EngineError."""
        self._check_phase()
        tenant = self.authenticator.tenant_named(given.tenant)
        if given.deadline_s is not None and time.monotonic() >= given.deadline_s:
            raise DeadlineError("The deadline passed before the request arrived.")
        if not (isinstance(given, GenerationInput) and given.is_continued):
            self.client.engine.check_room(tenant.name, 0)
            self.buffers.check_room(tenant.name)
        return tenant

    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingOutput:
    """The vectors of one call."""

    vectors: NDArray[np.float32]
    """`[num_prompts, size]`, in the order of the prompts."""
    num_prompt_tokens: int


class EmbeddingCall:
    """A running call that embeds or scores texts."""

    def __init__(self, running: Future[NDArray[np.float32]]) -> None:
        loop = asyncio.get_running_loop()
        self._running = running
        self._answer: asyncio.Future[NDArray[np.float32]] = loop.create_future()

        def deliver(done: Future[NDArray[np.float32]]) -> None:
            # The loop may be closed, with no reader left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._take, done)

        running.add_done_callback(deliver)

    async def vectors(self, deadline_s: float | None) -> NDArray[np.float32]:
        """Return the vectors; cancelling the wait cancels the call.

        Raises EngineError, and DeadlineError at the deadline.
        """
        timeout_s = None if deadline_s is None else deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer
        except TimeoutError as error:
            raise DeadlineError("The deadline passed before the texts were embedded.") from error
        finally:
            self._running.cancel()

    def abort(self) -> None:
        """Fail the call, which has no partial result."""
        self.fail(EngineError("The call was aborted."))

    def fail(self, error: PagedRayError) -> None:
        """End the call with an error, unless it has ended."""
        self._running.cancel()
        if not self._answer.done():
            self._answer.set_exception(error)

    def _take(self, done: Future[NDArray[np.float32]]) -> None:
        if self._answer.done() or done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._answer.set_result(done.result())
        else:
            self._answer.set_exception(error)
