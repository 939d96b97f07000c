"""One running generation call: the engine's events become text and usage."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec.structs import replace

from cluster.scheduling.event import ChainEvent, TokenEvent
from cluster.serving.beam_search import Beam, BeamSearch, beam_step
from cluster.serving.text.text_stream import SequenceOutput, StopStrings, TextStream
from pagedray.batch import PromptLogprobs, TokenLogprobs
from pagedray.errors import (
    DeadlineError,
    EngineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PagedRayError,
    invalid_field,
)
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from cluster.serving.continuation import Continuation, Encoded
    from cluster.serving.engine_client import EngineClient, EngineStream
    from cluster.serving.inputs import GenerationInput
    from cluster.serving.intake import OutputBuffer
    from cluster.serving.open_calls import OpenCall
    from cluster.serving.telemetry.call_watch import CallWatch
    from cluster.serving.text.text_stream import TokenBytes

__all__ = ["BeamStream", "GenerationCall", "GenerationOutput", "Usage"]

logger = logging.getLogger(__name__)

_FULL_POLL_S = 0.05


# Made for every token; they hold no reference cycles, so the garbage collector need not track them.
class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The tokens that a call has used so far."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_accepted_tokens: int = 0
    """Right drafts if the client predicted the output; the next field counts wrong drafts."""
    num_refused_tokens: int = 0


class GenerationOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Progress of a call's sequences since the last output, an entry for each with progress."""

    sequences: tuple[SequenceOutput, ...]
    usage: Usage
    is_last: bool
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Log-probabilities of a prompt, if requested, in one of the first outputs of its sequences."""


class GenerationCall:
    """A running call, which fails at its deadline."""

    def __init__(
        self,
        given: GenerationInput,
        requests: Sequence[Request],
        *,
        call: OpenCall,
        watch: CallWatch,
        client: EngineClient,
        token_bytes: TokenBytes,
        buffer: OutputBuffer,
    ) -> None:
        """Output that is not read is counted in `buffer`."""
        self.prompts = tuple(request.prompt_token_ids for request in requests)
        """The token ids of the prompts."""
        self.prompt_logprobs: dict[int, tuple[PromptLogprobs, ...]] = {}
        """Log-probabilities of the prompts that requested them, once they are computed."""
        self.has_prediction = bool(requests[0].prediction)
        """Whether the client predicted the output, and the engine uses that."""
        self._has_details = self.has_prediction or any(
            request.sampling.prompt_logprobs is not None for request in requests
        )
        """Whether events may have drafts to count, or log-probabilities of a prompt."""
        self.reasoning = requests[0].reasoning
        """How the reasoning of its sequences is marked; None if there is none."""
        self._call = call
        self._watch = watch
        self._texts = _text_streams(given, requests, token_bytes)
        self._num_unfinished = sum(len(request.open_indices) for request in requests)
        self._started_ids: set[str] = set()
        self._num_cached_tokens = 0
        self._num_accepted_tokens = self._num_refused_tokens = 0
        self._continuation = given.continuation
        self._num_per_prompt = requests[0].sampling.n
        self._unsent: list[tuple[int, tuple[int, ...], bool]] | None = None
        self._is_last = False
        self._has_failed = False
        self.replayed = self._replay(requests) if given.is_continued else None
        """Output of another replica, which the client has received, if this call continues."""
        self._is_closed = False
        self._kept: OutputBuffer | None = None
        # Last, so that nothing runs in the engine if anything above fails.
        open_requests = [one for one in requests if one.open_indices]
        self._stream: EngineStream | BeamStream = (
            client.open_stream(open_requests, buffer=buffer)
            if given.beam_length_penalty is None
            else BeamStream(client, open_requests, length_penalty=given.beam_length_penalty)
        )
        watch.note_open(call.id)
        self._deadline = CallDeadline(requests[0].deadline_s, self.fail)

    @property
    def continuation(self) -> Continuation | None:
        """Data that makes the call the same in other replicas; None without other replicas."""
        return self._continuation

    @property
    def id(self) -> str:
        """The client's own id of the call, or the server's id."""
        return self._call.id

    async def outputs(self) -> AsyncGenerator[GenerationOutput]:
        """Yield outputs until all sequences have ended. Raises EngineError or DeadlineError."""
        try:
            async for events in self._stream:
                output = self._output(events)
                yield output
                if output.is_last:
                    return
            # Otherwise the client would take the response as complete.
            raise EngineError("The engine ended the request before it was finished.")
        except PagedRayError as error:
            self._has_failed = isinstance(error, EngineError)
            self._watch.note_end(error)
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelling():
                raise
            # A cancellation that the client did not request would leave the client without an end.
            logger.error("Call %s failed.", self.id, exc_info=error)
            failure = InternalError()
            self._watch.note_end(failure)
            raise failure from error

    def follow_progress(self) -> Callable[[], Encoded]:
        """Return a function that returns the progress since its last call.

        For a call that may continue elsewhere.
        """
        self._unsent = []
        return self._take_progress

    def _take_progress(self) -> Encoded:
        unsent, self._unsent = self._unsent, []
        assert unsent is not None
        # The fields of a Progress.
        return (
            len(self._texts),
            tuple(unsent),
            self._num_cached_tokens,
            self._is_last,
            self._has_failed,
        )

    def abort(self) -> None:
        """End every sequence; the outputs end with the tokens generated so far."""
        self._stream.abort()

    def fail(self, error: PagedRayError) -> None:
        """End the outputs with `error`."""
        self._stream.close()
        self._stream.fail(error)

    @property
    def tenant(self) -> str:
        """The name of the tenant that made the call."""
        return self._call.tenant.name

    def keep_until_closed(self, buffer: OutputBuffer) -> None:
        """Count the bytes of a buffer, which are kept for the response, until it is closed."""
        self._kept = buffer

    def close(self, outcome: str | PagedRayError = "cancelled") -> None:
        """Abort unfinished sequences and free the call's id; idempotent.

        `outcome` is reported if the call has not ended by itself.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._kept is not None:
            self._kept.clear()
        self._deadline.cancel()
        self._call.close()
        self._stream.close()
        self._watch.note_end(outcome)

    def end_with(self, error: Exception) -> PagedRayError:
        """Close the call, and return the error for its client, who sees no details of a defect."""
        if not isinstance(error, PagedRayError):
            logger.error("Call %s failed.", self.id, exc_info=error)
            error = InternalError()
        self.close(error)
        return error

    def _output(self, events: list[TokenEvent]) -> GenerationOutput:
        sequences: list[SequenceOutput] = []
        num_tokens = 0
        found = self._read_details(events) if self._has_details else ()
        for key, group in self._by_sequence(events).items():
            if key[0] not in self._started_ids:
                self._started_ids.add(key[0])
                self._num_cached_tokens += group[0].num_cached_tokens
            text = self._texts[key]
            if not text.is_finished:
                sequence = text.add_events(group)
                if sequence.finish_reason is not None:
                    self._finish(key, sequence)
                num_tokens += len(sequence.token_ids)
                sequences.append(sequence)
        if self._unsent is not None:
            self._unsent += map(self._progress_of, sequences)
        self._call.num_generated_tokens += num_tokens
        self._watch.add_tokens(
            num_tokens, num_cached_tokens=self._num_cached_tokens, started_s=events[0].started_s
        )
        is_last = self._is_last = self._num_unfinished == 0
        if is_last:
            # A client that reads the last output may reuse the id immediately.
            self._deadline.cancel()
            self._call.release()
            last = sequences[-1]
            self._watch.note_end(last.failure or last.finish_reason or "stop")
        return GenerationOutput(
            sequences=tuple(sequences), usage=self._usage(), is_last=is_last, prompt_logprobs=found
        )

    def _read_details(self, events: list[TokenEvent]) -> tuple[PromptLogprobs, ...]:
        """Count drafts, and return the log-probabilities of a prompt, if an event has them."""
        found: tuple[PromptLogprobs, ...] = ()
        for event in events:
            if isinstance(event, ChainEvent):
                self._num_accepted_tokens += event.num_accepted
                self._num_refused_tokens += event.num_refused
            if event.prompt_logprobs:
                text = self._texts[event.request_id, event.index]
                found = self.prompt_logprobs[text.prompt_index] = event.prompt_logprobs
        return found

    def _by_sequence(self, events: list[TokenEvent]) -> dict[tuple[str, int], list[TokenEvent]]:
        if len(events) == 1 or len(self._texts) == 1:
            # The common cases.
            first = events[0]
            return {(first.request_id, first.index): events}
        grouped: dict[tuple[str, int], list[TokenEvent]] = {}
        for event in events:
            grouped.setdefault((event.request_id, event.index), []).append(event)
        return grouped

    def _finish(self, key: tuple[str, int], output: SequenceOutput) -> None:
        """Note the last output of a sequence. Raises DeadlineError if the deadline ended it."""
        self._num_unfinished -= 1
        # Without effect if the engine ended the sequence.
        self._stream.finish_sequence(*key)
        if output.finish_reason is FinishReason.ABORT:
            self._deadline.check()

    def _progress_of(self, output: SequenceOutput) -> tuple[int, tuple[int, ...], bool]:
        number = output.prompt_index * self._num_per_prompt + output.index
        return number, output.token_ids, output.finish_reason is not None

    def _replay(self, requests: Sequence[Request]) -> GenerationOutput:
        """Bring the texts to where the call was cut, and return the tokens generated before."""
        continuation = self._continuation
        assert continuation is not None
        self._num_cached_tokens = continuation.num_cached_tokens
        self._call.num_generated_tokens = sum(len(one.token_ids) for one in continuation.sequences)
        outputs: list[SequenceOutput] = []
        for request in requests:
            if any(token_ids != () for token_ids in request.generated_token_ids):
                self._started_ids.add(request.id)
            for index, token_ids in enumerate(request.generated_token_ids):
                if token_ids:
                    event = _event_of(request, index, token_ids)
                    outputs.append(self._texts[request.id, index].add_events([event]))
        if any(one.finish_reason is not None for one in outputs):
            raise InvalidRequestError("A sequence cannot continue after its stop string.")
        return GenerationOutput(sequences=tuple(outputs), usage=self._usage(), is_last=False)

    def _usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self._call.num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._call.num_generated_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_refused_tokens=self._num_refused_tokens,
        )


def _text_streams(
    given: GenerationInput, requests: Sequence[Request], token_bytes: TokenBytes
) -> dict[tuple[str, int], TextStream]:
    """Return the texts of all sequences, by request id and index."""
    reasoning = requests[0].reasoning
    # Marks of the reasoning that are special tokens are needed to find its end.
    has_special_marks = reasoning is not None and reasoning.has_special_tokens
    stops = StopStrings(requests[0].sampling.stop)
    return {
        (request.id, index): TextStream(
            request,
            index,
            token_bytes,
            stops=stops,
            prompt_index=prompt_index,
            skips_special_tokens=given.skips_special_tokens and not has_special_marks,
            includes_stop=given.includes_stop,
        )
        for prompt_index, request in enumerate(requests)
        for index in range(request.sampling.n)
    }


def _is_cancelling() -> bool:
    """Return whether the current task is being cancelled."""
    # A variable with the task would be in the error's traceback, and the error in the task.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _event_of(request: Request, index: int, token_ids: tuple[int, ...]) -> TokenEvent:
    """Return an event with tokens that were sent before, log-probabilities included."""
    has_logprobs = request.sampling.logprobs is not None
    logprobs = (TokenLogprobs(0.0, [], []),) * len(token_ids) if has_logprobs else ()
    return TokenEvent(request.id, index, token_ids, logprobs)


class CallDeadline:
    """Fails a call after its deadline, if it has a deadline."""

    def __init__(self, deadline_s: float | None, fail: Callable[[DeadlineError], None]) -> None:
        """`deadline_s` is a time of the monotonic clock; `fail` is called on the event loop."""
        self._deadline_s = deadline_s
        self._timer: asyncio.TimerHandle | None = None
        # The engine ends late requests too, but only between steps and while it has ranks.
        if deadline_s is not None:
            delay_s = deadline_s - time.monotonic()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, lambda: fail(_error()))

    def check(self) -> None:
        """Raise DeadlineError if the deadline has passed."""
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            raise _error()

    def cancel(self) -> None:
        """Do not fail the call, which has ended. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _error() -> DeadlineError:
    return DeadlineError("The deadline passed before the request was finished.")


class BeamStream:
    """The events of requests that have `n` beams each, beam by beam once the last search has ended.

    Each step is a request of the engine for each beam; the prefix cache has the beams' blocks. Has
    the methods of `EngineStream`.
    """

    def __init__(
        self, client: EngineClient, requests: Sequence[Request], *, length_penalty: float
    ) -> None:
        """Submit the first step. Raises the errors of `EngineClient.open_stream`."""
        self._client = client
        self._searches = [(request, _search_of(request, length_penalty)) for request in requests]
        self._started_s = 0.0
        self._ending: Iterator[TokenEvent] | None = None
        """The events that are left, once the last search has ended."""
        self._cut: TokenEvent | None = None
        """How all sequences end, if not by the search."""
        self._error: PagedRayError | None = None
        self._step_ids: list[str] = []
        self._steps = client.open_stream(self._step_requests())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        if self._ending is None:
            while await self._take_step():
                await self._open_step()
            self._ending = self._events()
        else:
            # The work for a beam may take milliseconds.
            await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        for event in self._ending:
            return [event]
        raise StopAsyncIteration

    def finish_sequence(self, request_id: str, index: int) -> None:
        """Do nothing: sequences have events only at their end."""

    def abort(self) -> None:
        """End every sequence without tokens."""
        self._stop(TokenEvent("", 0, finish_reason=FinishReason.ABORT))

    def close(self) -> None:
        """Abort the running requests in the engine."""
        self.abort()

    def fail(self, error: PagedRayError) -> None:
        """End the stream with `error`."""
        self._error = error
        self.abort()

    def _stop(self, event: TokenEvent) -> None:
        if self._cut is None:
            self._cut = event
        self._steps.close()

    async def _take_step(self) -> bool:
        """Wait for a step; return whether another step is needed."""
        found: dict[str, TokenLogprobs] = {}
        async for events in self._steps:
            for event in events:
                self._started_s = self._started_s or event.started_s
                if event.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                    self._stop(event)
                elif event.logprobs:
                    found[event.request_id] = event.logprobs[0]
        if self._cut is not None:
            return False
        likeliest = iter([found[step_id] for step_id in self._step_ids])
        for _, search in self._searches:
            if search.running:
                search.advance([next(likeliest) for _ in search.running])
        return any(search.running for _, search in self._searches)

    async def _open_step(self) -> None:
        while self._cut is None:
            try:
                self._steps = self._client.open_stream(self._step_requests())
                return
            except OverloadedError:
                # The call was admitted, and its search has begun.
                await asyncio.sleep(_FULL_POLL_S)

    def _step_requests(self) -> list[Request]:
        requests = [
            beam_step(request, beam, max(search.num_logprobs, request.sampling.logprobs or 0))
            for request, search in self._searches
            for beam in search.running
        ]
        self._step_ids = [request.id for request in requests]
        return requests

    def _events(self) -> Iterator[TokenEvent]:
        for request, search in self._searches:
            # The client of a call that continues here has the others.
            for index in request.open_indices:
                if self._cut is None and index < len(search.best):
                    yield self._event_of(request, index, search.best[index][1])
                else:
                    cut = self._cut or TokenEvent("", 0, finish_reason=FinishReason.ERROR)
                    yield replace(cut, request_id=request.id, index=index)

    def _event_of(self, request: Request, index: int, beam: Beam) -> TokenEvent:
        number = request.sampling.logprobs
        return TokenEvent(
            request.id,
            index,
            beam.token_ids,
            () if number is None else tuple(_first(one, number) for one in beam.logprobs),
            FinishReason.STOP if beam.is_ended else FinishReason.LENGTH,
            beam.token_ids[-1] if beam.is_ended else None,
            num_prompt_tokens=len(request.prompt_token_ids),
            started_s=self._started_s,
        )


def _search_of(request: Request, length_penalty: float) -> BeamSearch:
    sampling = request.sampling
    search = BeamSearch(
        width=sampling.n,
        max_tokens=sampling.max_tokens,
        eos_token_ids=() if sampling.ignore_eos else request.eos_token_ids,
        length_penalty=length_penalty,
    )
    if search.num_logprobs > MAX_LOGPROBS:
        most = MAX_LOGPROBS - search.num_logprobs + sampling.n
        raise invalid_field("n", f"must be from 1 to {most} in a beam search, not {sampling.n}.")
    return search


def _first(found: TokenLogprobs, number: int) -> TokenLogprobs:
    return TokenLogprobs(found.chosen, found.token_ids[:number], found.logprobs[:number])
