"""The asyncio side of the engine: requests go in, the token events of each come out.

The engine publishes from its own thread. A batch of events wakes the event loop once, however
many requests it covers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from cluster.engine.embedder import Embedder
from cluster.serving.engine_stream import EngineStream
from cluster.serving.engines import EmbeddingEngine, Engine, GenerationEngine
from pagedray.errors import EngineError, InternalError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from cluster.engine.controller import Controller
    from cluster.scheduling.event import TokenEvent
    from cluster.serving.memory.output_buffer import OutputBuffer
    from pagedray.request import Request

__all__ = ["EngineClient"]

logger = logging.getLogger(__name__)

AnyEngine = TypeVar("AnyEngine", bound=Engine)


class EngineClient:
    """Delivers the engine's events to the streams of their requests.

    `publish` and `fail_all` may be called from any thread, the rest from the loop's thread only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._engine: Engine | None = None
        self._generation_engine: GenerationEngine | None = None
        self._embedding_engine: EmbeddingEngine | None = None
        self._streams: dict[str, EngineStream] = {}

    def attach_engine(self, engine: Controller | Embedder) -> None:
        """Submit requests to `engine`, of either kind."""
        if isinstance(engine, Embedder):
            self.attach_embedding_engine(engine)
        else:
            self.attach_generation_engine(engine)

    def attach_generation_engine(self, engine: GenerationEngine) -> None:
        """Submit generation requests to `engine`, which publishes its events here."""
        self._engine = self._generation_engine = engine

    def attach_embedding_engine(self, encoder: EmbeddingEngine) -> None:
        """Submit embedding requests to `encoder`, which returns a future for each."""
        self._engine = self._embedding_engine = encoder

    @property
    def is_attached(self) -> bool:
        """Whether there is an engine, which may still fail."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineError while there is none."""
        return _loaded(self._engine)

    @property
    def embedding_engine(self) -> EmbeddingEngine:
        """The embedding engine. Raises EngineError while there is none."""
        return _loaded(self._embedding_engine)

    @property
    def generation_engine(self) -> GenerationEngine:
        """The generation engine. Raises EngineError while there is none."""
        return _loaded(self._generation_engine)

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
        engine = self.generation_engine
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


def _loaded(engine: AnyEngine | None) -> AnyEngine:
    if engine is None:
        raise EngineError("The model is not loaded yet.")
    return engine
