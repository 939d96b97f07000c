"""The one servicer behind every front: validated requests in, text out.

It speaks no protocol. Fronts turn what it yields, and the errors it raises, into theirs.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from cluster.serving.metrics import Metrics
from cluster.serving.text_pool import TextPool
from cluster.serving.text_stream import SequenceOutput, TextStream
from cluster.serving.validator import Validator
from pagedray.errors import (
    DeadlineError,
    EngineError,
    InvalidRequestError,
    PagedRayError,
    ShuttingDownError,
)
from pagedray.request import FinishReason, Request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cluster.scheduling.event import TokenEvent
    from cluster.serving.engine_client import EngineClient
    from cluster.serving.inputs import GenerationInput
    from cluster.serving.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

__all__ = ["Generation", "GenerationOutput", "Servicer", "Usage"]

_IDLE_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a call has used so far."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """What the sequences of a call gained since the last output, one entry for each."""

    sequences: tuple[SequenceOutput, ...]
    usage: Usage
    is_last: bool


class _Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Servicer:
    """Starts and tracks the calls of every front. Used from the event loop only."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        text_pool: TextPool | None = None,
    ) -> None:
        """Long texts go to `text_pool`, which is closed with the servicer."""
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self._text_pool = TextPool() if text_pool is None else text_pool
        self.validator = Validator(config, tokenizer, text_pool=self._text_pool)
        self.metrics = Metrics(client)
        self._phase = _Phase.STARTING
        self._running: set[Generation] = set()
        self._by_id: dict[tuple[str, str], Generation] = {}

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken and the engine makes progress."""
        return self._phase is _Phase.READY and self.client.is_healthy

    @property
    def num_running(self) -> int:
        """Calls that have not ended."""
        return len(self._running)

    def set_ready(self) -> None:
        """Take requests from now on."""
        if self._phase is _Phase.STARTING:
            self._phase = _Phase.READY

    async def drain(self, grace_s: float) -> None:
        """Take no more requests, and end those that run longer than `grace_s`."""
        self._phase = _Phase.DRAINING
        deadline_s = time.monotonic() + grace_s
        while self._running and time.monotonic() < deadline_s:
            await asyncio.sleep(_IDLE_POLL_S)
        for generation in list(self._running):
            generation.fail(EngineError("The server shut down before the request was finished."))

    async def close(self) -> None:
        """End the threads that work on texts; nothing is validated from then on."""
        await self._text_pool.close()

    async def start(self, given: GenerationInput) -> Generation:
        """Validate a call and hand it to the engine; the caller closes what is returned.

        Raises RequestError or EngineError; then nothing was started.
        """
        started_s = time.monotonic()
        try:
            self._check_phase()
            requests = await self.validator.validate(given)
            # Tokenizing took time, in which a drain may have begun.
            self._check_phase()
            return self._open(given, requests, started_s)
        except PagedRayError as error:
            self.metrics.count_refusal(error)
            raise

    def abort(self, tenant: str, client_id: str) -> None:
        """End the call with this id; without one, do nothing."""
        generation = self._by_id.get((tenant, client_id))
        if generation is not None:
            generation.abort()

    def _check_phase(self) -> None:
        if self._phase is _Phase.STARTING:
            raise EngineError("The model is not loaded yet.")
        if self._phase is _Phase.DRAINING:
            raise ShuttingDownError

    def _open(
        self, given: GenerationInput, requests: tuple[Request, ...], started_s: float
    ) -> Generation:
        visible_id = requests[0].id if given.client_id is None else given.client_id
        key = (given.tenant, visible_id)
        if key in self._by_id:
            raise InvalidRequestError(
                f"request_id {visible_id!r} belongs to a request that is running.",
                param="request_id",
            )
        generation = Generation(self, key, requests, started_s)
        self._running.add(generation)
        self._by_id[key] = generation
        return generation

    def free_id(self, generation: Generation) -> None:
        """Let the id of an ended call be used again."""
        if self._by_id.get(generation.key) is generation:
            del self._by_id[generation.key]

    def forget(self, generation: Generation) -> None:
        """Count a call as ended."""
        self.free_id(generation)
        self._running.discard(generation)


class Generation:
    """One running call."""

    def __init__(
        self,
        servicer: Servicer,
        key: tuple[str, str],
        requests: tuple[Request, ...],
        started_s: float,
    ) -> None:
        self._servicer = servicer
        self.key = key
        """The call's tenant and the id that the client knows."""
        self._deadline_s = requests[0].deadline_s
        self._texts = {
            (request.id, index): TextStream(
                request, index, servicer.tokenizer.token_bytes, prompt_index=prompt_index
            )
            for prompt_index, request in enumerate(requests)
            for index in range(request.sampling.n)
        }
        self._num_unfinished = len(self._texts)
        self._num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._num_cached_tokens: dict[str, int] = {}
        self._num_generated_tokens = 0
        self._is_closed = False
        # Last, so that nothing runs in the engine unless all of the above went well.
        self._stream = servicer.client.open(requests)
        self._timing = servicer.metrics.timing(started_s)

    @property
    def id(self) -> str:
        """The id that the client knows: its own, or the one the server made."""
        return self.key[1]

    async def outputs(self) -> AsyncGenerator[GenerationOutput]:
        """Yield what the sequences gain until all have ended.

        Raises EngineError or DeadlineError if they cannot.
        """
        try:
            async for events in self._stream:
                output = self._output(events)
                yield output
                if output.is_last:
                    return
        except PagedRayError as error:
            self._timing.end(error)
            raise

    def abort(self) -> None:
        """End every sequence; the outputs end with what there is."""
        self._stream.abort()

    def fail(self, error: EngineError) -> None:
        """End the outputs with `error`."""
        self._stream.close()
        self._stream.fail(error)

    def close(self) -> None:
        """Abort what is not finished and free the call's id; closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
        self._servicer.forget(self)
        self._stream.close()
        self._timing.end("cancelled")

    def _output(self, events: list[TokenEvent]) -> GenerationOutput:
        grouped: dict[tuple[str, int], list[TokenEvent]] = {}
        for event in events:
            grouped.setdefault((event.request_id, event.index), []).append(event)
            self._num_cached_tokens.setdefault(event.request_id, event.num_cached_tokens)
        sequences = tuple(
            self._push(request_id, index, group)
            for (request_id, index), group in grouped.items()
            if not self._texts[request_id, index].is_finished
        )
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        self._num_generated_tokens += num_tokens
        self._timing.add_tokens(num_tokens)
        is_last = self._num_unfinished == 0
        if is_last:
            # Whoever reads the end may use the id again at once.
            self._servicer.free_id(self)
            self._timing.end(sequences[-1].finish_reason or "stop")
        return GenerationOutput(
            sequences=sequences,
            usage=Usage(
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=sum(self._num_cached_tokens.values()),
                num_generated_tokens=self._num_generated_tokens,
            ),
            is_last=is_last,
        )

    def _push(self, request_id: str, index: int, events: list[TokenEvent]) -> SequenceOutput:
        output = self._texts[request_id, index].push(events)
        if output.finish_reason is None:
            return output
        self._num_unfinished -= 1
        # Does nothing if the engine itself ended it.
        self._stream.finish(request_id, index)
        if output.finish_reason is FinishReason.ABORT and self._is_late():
            raise DeadlineError("The deadline passed before the request was finished.")
        return output

    def _is_late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s
