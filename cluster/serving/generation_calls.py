"""Calls that generate text, from their arrival until their requests are submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.serving.calls.generation_call import GenerationCall
from pagedray.errors import EngineError, ForbiddenError

if TYPE_CHECKING:
    from cluster.serving.call_admission import CallAdmission
    from cluster.serving.calls.open_calls import OpenCall, OpenCalls
    from cluster.serving.engine_client import EngineClient
    from cluster.serving.inputs import GenerationInput
    from cluster.serving.memory.output_buffer import OutputBuffers
    from cluster.serving.resume.registry import ResumableStreams
    from cluster.serving.telemetry.call_watch import CallObserver, CallWatch
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.serving.validation.validator import Validator
    from pagedray.request import Request

__all__ = ["GenerationCalls"]

_CONTINUED = "The request continues in another call."


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
