"""Requests of `LLM` from their submission to their end, on the thread of the caller."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from tqdm import tqdm

from pagedray.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Sequence

    from cluster.engine.controller import Controller
    from cluster.engine.event_buffers import EventBuffer, EventDispatcher
    from cluster.generation import Collector, Generation
    from cluster.scheduling.event import TokenEvent
    from cluster.serving.text.text_stream import SequenceOutput
    from pagedray.request import Request

__all__ = ["HELD_POLL_S", "RequestRunner"]

HELD_POLL_S = 0.05
"""Time between two attempts to submit what the queue has no room for."""


class RequestRunner:
    """Submits requests as the queue has room, and brings their events to their collectors."""

    def __init__(self, controller: Controller, sink: EventDispatcher) -> None:
        self._controller = controller
        self._sink = sink

    def complete(
        self, collectors: Sequence[Collector], *, show_progress: bool = False
    ) -> list[Generation]:
        """Run the request of each collector to its end, and return the results in order.

        Raises EngineError if the engine fails; all of the requests are aborted then.
        """
        requests = [one.request for one in collectors]
        # Stop strings must be looked for as tokens arrive.
        is_watched = any(request.sampling.stop for request in requests)
        buffer = self._sink.open_buffer(requests, is_watched=is_watched)
        try:
            self._collect(collectors, buffer, show_progress)
        except BaseException:
            for request in requests:
                self._controller.abort_request(request.id)
            raise
        finally:
            self._sink.close_buffer(requests)
        return [one.generation() for one in collectors]

    def stream(self, collector: Collector) -> Generator[str]:
        """Yield the text of a request with one sequence as it is generated."""
        request = collector.request
        buffer = self._sink.open_buffer([request], is_watched=True)
        try:
            while self._submit_all([request]) is not None:
                time.sleep(HELD_POLL_S)
            while not collector.is_finished:
                for event in buffer.take_events():
                    if text := self._push(collector, [event]).text:
                        yield text
        finally:
            self._controller.abort_request(request.id)
            self._sink.close_buffer([request])

    def _collect(
        self, collectors: Sequence[Collector], buffer: EventBuffer, show_progress: bool
    ) -> None:
        by_id = {one.request.id: one for one in collectors}
        waiting = iter([one.request for one in collectors])
        held = self._submit_all(waiting)
        num_open = len(collectors)
        with tqdm(total=num_open, unit="prompt", disable=not show_progress) as bar:
            while num_open:
                # A queue filled by other calls drains without an event for this one.
                taken = buffer.take_events(None if held is None else HELD_POLL_S)
                for events in _by_sequence(taken):
                    collector = by_id[events[0].request_id]
                    if collector.is_finished:
                        continue
                    self._push(collector, events)
                    if collector.is_finished:
                        num_open -= 1
                        bar.update()
                if held is not None:
                    held = self._submit_all([held]) or self._submit_all(waiting)

    def _submit_all(self, requests: Iterable[Request]) -> Request | None:
        """Submit until the queue is full; return the first request that did not fit."""
        for request in requests:
            try:
                self._controller.submit_request(request)
            except OverloadedError:
                return request
        return None

    def _push(self, collector: Collector, events: Sequence[TokenEvent]) -> SequenceOutput:
        output, last = collector.push_events(events), events[-1]
        if output.finish_reason is not None and last.finish_reason is None:
            # A stop string ended it, which the engine does not see.
            self._controller.finish_sequence(last.request_id, last.index)
        return output


def _by_sequence(events: Iterable[TokenEvent]) -> Collection[Sequence[TokenEvent]]:
    """Return the events of each sequence, which are converted to text at once."""
    found: defaultdict[tuple[str, int], list[TokenEvent]] = defaultdict(list)
    for event in events:
        found[event.request_id, event.index].append(event)
    return found.values()
