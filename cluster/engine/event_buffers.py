"""Buffers of events between the step thread and the calls of `LLM`."""

from __future__ import annotations

import threading
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.scheduling.event import TokenEvent
    from pagedray.errors import EngineError
    from pagedray.request import Request

__all__ = ["EventBuffer", "EventDispatcher"]

_MANY_EVENTS = 8192
"""So many are taken before a sequence ends, so that little is left to convert at the end."""


class EventBuffer:
    """Holds the events of one call until its thread takes them.

    The thread wakes for every token only if `is_watched`, which streams and stop strings need:
    each wake-up takes the core and the GIL from the step thread.
    """

    def __init__(self, *, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._events: list[TokenEvent] = []
        self._error: EngineError | None = None
        self._has_news = threading.Condition()

    def put_events(self, events: Iterable[TokenEvent]) -> None:
        """Add at least one event."""
        with self._has_news:
            first = len(self._events)
            self._events += events
            if self._is_worth_taking(first):
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
        return self._error is not None or self._is_worth_taking(0)

    def _is_worth_taking(self, first: int) -> bool:
        """Return whether the thread is to wake for the events from index `first` on."""
        events = self._events
        if self._is_watched or len(events) >= _MANY_EVENTS:
            return len(events) > first
        return any(event.finish_reason is not None for event in events[first:])


class EventDispatcher:
    """Distributes events to the buffers of their calls; the `EventSink` of `LLM`."""

    def __init__(self) -> None:
        self._buffers: dict[str, EventBuffer] = {}
        self._lock = threading.Lock()

    def open_buffer(self, requests: Sequence[Request], *, is_watched: bool) -> EventBuffer:
        """Return a buffer for the events of a call; the caller closes it."""
        buffer = EventBuffer(is_watched=is_watched)
        self.add_requests(buffer, requests)
        return buffer

    def add_requests(self, buffer: EventBuffer, requests: Sequence[Request]) -> None:
        """Send the events of further requests of a call, not yet submitted, to its buffer."""
        with self._lock:
            self._buffers |= dict.fromkeys((request.id for request in requests), buffer)

    def close_buffer(self, requests: Sequence[Request]) -> None:
        """Discard further events of a call."""
        with self._lock:
            for request in requests:
                self._buffers.pop(request.id, None)

    def publish(self, events: Sequence[TokenEvent]) -> None:
        """Add events to the buffers of their calls; drop events of closed buffers."""
        with self._lock:
            # Most steps have events of one call.
            for buffer, some in groupby(events, self._buffer_of):
                if buffer is not None:
                    buffer.put_events(some)

    def _buffer_of(self, event: TokenEvent) -> EventBuffer | None:
        return self._buffers.get(event.request_id)

    def fail_all(self, error: EngineError) -> None:
        """End all open calls with an error."""
        with self._lock:
            for buffer in self._buffers.values():
                buffer.put_error(error)
