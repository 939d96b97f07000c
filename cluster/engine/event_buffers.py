"""Buffers of events between the step thread and the calls of `LLM`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.event import TokenEvent
    from pagedray.errors import EngineError
    from pagedray.request import Request

__all__ = ["EventBuffer", "EventDispatcher"]


class EventBuffer:
    """Holds the events of one call until its thread takes them.

    The thread wakes for every token only if `is_watched`, which streams and stop strings need:
    each wake-up costs the step thread its core and the interpreter's lock.
    """

    def __init__(self, *, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._events: list[TokenEvent] = []
        self._error: EngineError | None = None
        self._has_news = threading.Condition()

    def put_event(self, event: TokenEvent) -> None:
        with self._has_news:
            self._events.append(event)
            if self._is_watched or event.finish_reason is not None:
                self._has_news.notify()

    def put_error(self, error: EngineError) -> None:
        """Raise `error` from `take_events` once all events are taken."""
        with self._has_news:
            self._error = error
            self._has_news.notify()

    def take_events(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """Wait for events and return all since the last call. Raises EngineError."""
        with self._has_news:
            self._has_news.wait_for(self._is_worth_waking, timeout_s)
            events, self._events = self._events, []
            if not events and self._error is not None:
                raise self._error
            return events

    def _is_worth_waking(self) -> bool:
        if self._error is not None:
            return True
        if self._is_watched:
            return bool(self._events)
        return any(event.finish_reason is not None for event in self._events)


class EventDispatcher:
    """Distributes events to the buffers of their calls; the `EventSink` of `LLM`."""

    def __init__(self) -> None:
        self._buffers: dict[str, EventBuffer] = {}
        self._lock = threading.Lock()

    def open_buffer(self, requests: Sequence[Request], *, is_watched: bool) -> EventBuffer:
        """Return a buffer for the events of a call; the caller closes it."""
        buffer = EventBuffer(is_watched=is_watched)
        with self._lock:
            self._buffers |= dict.fromkeys((request.id for request in requests), buffer)
        return buffer

    def close_buffer(self, requests: Sequence[Request]) -> None:
        """Discard further events of a call."""
        with self._lock:
            for request in requests:
                self._buffers.pop(request.id, None)

    def publish(self, events: Sequence[TokenEvent]) -> None:
        with self._lock:
            for event in events:
                buffer = self._buffers.get(event.request_id)
                if buffer is not None:
                    buffer.put_event(event)

    def fail_all(self, error: EngineError) -> None:
        with self._lock:
            for buffer in self._buffers.values():
                buffer.put_error(error)
