"""The asyncio side of the engine: requests go in, the token events of each come out.

The engine publishes from its own thread. A batch of events wakes the event loop once, however
many requests it covers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol, Self

from cluster.scheduling.event import TokenEvent
from pagedray.errors import EngineError, InternalError, StalledReaderError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from cluster.engine.embedding_scheduler import EmbeddingRequest
    from cluster.engine.stats import EngineStats
    from cluster.serving.intake import OutputBuffer
    from pagedray.errors import PagedRayError
    from pagedray.request import Request

__all__ = ["EngineClient", "EngineStream"]

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """The interface of any engine to the frontends; thread-safe."""

    def check_room(self, tenant: str, num_tokens: int) -> None:
        """Raise OverloadedError if the queue has no room for this many more prompt tokens."""

    def stats(self) -> EngineStats:
        """Return the current counts."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether requests are accepted and steps run."""
        ...

    @property
    def error(self) -> EngineError | None:
        """The error that ended the engine permanently, if any."""
        ...

    def submit_request(self, request: Request) -> None:
        """Accept a request. Raises CapacityError, OverloadedError or EngineError."""

    def submit_texts(self, texts: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        """Accept texts to embed. Raises OverloadedError or EngineError."""
        ...

    def abort_request(self, request_id: str) -> None:
        """End a request; ignore an unknown or ended request."""

    def finish_sequence(self, request_id: str, index: int) -> None:
        """End one sequence of a request, without an event for it."""


_FEW_EVENTS = 64
_FEW_STEPS = 4
# The memory of an unread event, as measured with tracemalloc.
_EVENT_BYTES = 256
_LOGPROBS_BYTES = 256
_LOGPROB_BYTES = 80


class EngineClient:
    """Delivers the engine's events to the streams of their requests.

    `publish` and `fail_all` may be called from any thread, the rest from the loop's thread only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._engine: Engine | None = None
        self._streams: dict[str, EngineStream] = {}

    def attach_engine(self, engine: Engine) -> None:
        """Submit requests to `engine`, which publishes its events here."""
        self._engine = engine

    @property
    def is_attached(self) -> bool:
        """Whether there is an engine, which may still fail."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineError while there is none."""
        if self._engine is None:
            raise EngineError("The model is not loaded yet.")
        return self._engine

    @property
    def is_healthy(self) -> bool:
        """Whether an engine is attached and makes progress."""
        return self._engine is not None and self._engine.is_healthy

    @property
    def has_failed(self) -> bool:
        """Whether an engine is attached and has failed permanently."""
        return self._engine is not None and self._engine.error is not None

    def publish(self, events: Sequence[TokenEvent]) -> None:
        """Deliver the events of one step."""
        # Waking the event loop is slow, so skip events of closed calls.
        if any(event.request_id in self._streams for event in events):
            self._call(lambda: self._deliver(events))

    def fail_all(self, error: EngineError) -> None:
        """End every open stream with `error`."""
        self._call(lambda: self._fail(error))

    def open_stream(
        self, requests: Sequence[Request], *, buffer: OutputBuffer | None = None
    ) -> EngineStream:
        """Submit requests and return the stream of their events.

        Unread events are counted in `buffer`; beyond its limits the stream ends with UnreadError.
        Raises CapacityError, OverloadedError or EngineError; then none of the requests runs.
        """
        engine = self.engine
        stream = EngineStream(engine, requests, forget=self._forget, buffer=buffer)
        try:
            for request in requests:
                # Events may come before `submit_request` returns.
                self._streams[request.id] = stream
                engine.submit_request(request)
        except BaseException:
            stream.close()
            raise
        return stream

    def _forget(self, request_id: str) -> None:
        """Drop further events of a request."""
        self._streams.pop(request_id, None)

    def _call(self, deliver: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            # The loop may be closed, with no reader left.
            if not self._loop.is_closed():
                raise

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            try:
                stream.put_event(event)
            except Exception as error:
                # The events of the other calls follow.
                logger.error("A call failed.", exc_info=error)
                stream.close()
                stream.fail(InternalError())

    def _fail(self, error: EngineError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)


class EngineStream:
    """The events of a call's requests, in the order they were published.

    Each item is the list of all events since the last item. Closing the stream early aborts its
    unfinished requests.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        *,
        forget: Callable[[str], None],
        buffer: OutputBuffer | None = None,
    ) -> None:
        """`forget` is called with each request of which no more events are wanted."""
        self._forget = forget
        self._engine = engine
        self._unfinished = {request.id: set(request.open_indices) for request in requests}
        self._pending: list[TokenEvent] = []
        # Looked up once: getting the running loop is a system call in some versions of Python.
        self._new_waiter = asyncio.get_running_loop().create_future
        self._waiter: asyncio.Future[None] | None = None
        self._error: PagedRayError | None = None
        self._buffer = buffer
        num_sequences = sum(map(len, self._unfinished.values()))
        self._num_uncounted = _FEW_EVENTS + _FEW_STEPS * num_sequences
        """Events that may be unread without being counted: a busy event loop is late, too."""
        self._num_counted = 0
        """Bytes of the pending events that are counted in the buffer."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = self._new_waiter()
            await self._waiter
        events, self._pending = self._pending, []
        if self._num_counted:
            self._uncount()
        return events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def finish_sequence(self, request_id: str, index: int) -> None:
        """End a sequence and drop its further events."""
        if self._end(request_id, index):
            self._engine.finish_sequence(request_id, index)
            self._wake()

    def abort(self) -> None:
        """End every unfinished sequence; the stream ends with an event for each."""
        ended = [
            TokenEvent(request_id, index, finish_reason=FinishReason.ABORT)
            for request_id, indices in self._unfinished.items()
            for index in sorted(indices)
        ]
        self.close()
        self._pending += ended
        self._wake()

    def close(self) -> None:
        """Abort the unfinished requests immediately."""
        self._uncount()
        self._wake()
        unfinished, self._unfinished = self._unfinished, {}
        for request_id in unfinished:
            self._forget(request_id)
        for request_id in unfinished:
            self._engine.abort_request(request_id)

    def put_event(self, event: TokenEvent) -> None:
        """Append an event of the engine."""
        if event.index not in self._unfinished.get(event.request_id, ()):
            return
        if event.finish_reason is not None:
            self._end(event.request_id, event.index)
        self._pending.append(event)
        if len(self._pending) > self._num_uncounted and self._buffer is not None:
            # The reader is behind.
            self._count(event, self._buffer)
        self._wake()

    def fail(self, error: PagedRayError) -> None:
        """End with `error` once the pending events are read."""
        for request_id in self._unfinished:
            self._forget(request_id)
        self._unfinished = {}
        self._error = error
        self._wake()

    def _end(self, request_id: str, index: int) -> bool:
        indices = self._unfinished.get(request_id, set())
        if index not in indices:
            return False
        indices.discard(index)
        if not indices:
            del self._unfinished[request_id]
            self._forget(request_id)
        return True

    def _count(self, event: TokenEvent, buffer: OutputBuffer) -> None:
        """Count an unread event; beyond the limits, drop all of them and fail."""
        num_bytes = _EVENT_BYTES
        for one in event.logprobs:
            num_bytes += _LOGPROBS_BYTES + _LOGPROB_BYTES * len(one.token_ids)
        try:
            buffer.add(num_bytes)
        except StalledReaderError as error:
            self.close()
            self._pending.clear()
            self.fail(error)
            return
        self._num_counted += num_bytes

    def _uncount(self) -> None:
        if self._buffer is not None and self._num_counted:
            self._buffer.remove(self._num_counted)
            self._num_counted = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
