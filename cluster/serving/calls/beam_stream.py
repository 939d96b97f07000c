"""The beams of a call, as events of its requests like those of the engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from cluster.scheduling.event import TokenEvent
from cluster.serving.beams.search import Beam, BeamSearch
from cluster.serving.beams.step import beam_step
from pagedray.batch import TokenLogprobs
from pagedray.errors import InvalidRequestError, OverloadedError, PagedRayError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.serving.engine_client import EngineClient

__all__ = ["BeamStream"]

_FULL_POLL_S = 0.05


class BeamStream:
    """The events of requests that have `n` beams each, beam by beam once the last search has ended.

    Each step is one request of the engine for each beam, whose blocks are found in the prefix
    cache. The methods are those of `EngineStream`.
    """

    def __init__(
        self, client: EngineClient, requests: Sequence[Request], *, length_penalty: float
    ) -> None:
        """Submit the first step. Raises what `EngineClient.open_stream` does."""
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
            # What is done with one beam may take milliseconds.
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
        """Abort what runs in the engine."""
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
        """Wait for a step; return whether another one is needed."""
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
        raise InvalidRequestError(
            f"n must be from 1 to {most} in a beam search, not {sampling.n}.", param="n"
        )
    return search


def _first(found: TokenLogprobs, number: int) -> TokenLogprobs:
    return TokenLogprobs(found.chosen, found.token_ids[:number], found.logprobs[:number])
