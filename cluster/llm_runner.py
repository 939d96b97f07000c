"""Requests of `LLM` from their submission to their end, on the thread of the caller."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from tqdm import tqdm

from pagedray.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
    from typing import NoReturn

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
        self,
        collectors: Iterable[Collector],
        *,
        total: int,
        is_watched: bool,
        show_progress: bool = False,
    ) -> list[Generation]:
        """Run the request of each of `total` collectors to its end; return the results in order.

        A request is submitted before the next collector is made. Tokens are read as they arrive if
        the call `is_watched`, which stop strings need. Raises EngineError if the engine fails, and
        what making a collector raises; all of the requests are aborted then.
        """
        buffer = self._sink.open_buffer([], is_watched=is_watched)
        opened: dict[str, Collector] = {}
        try:
            waiting = self._submit_all(collectors, buffer, opened)
            bar = tqdm(total=total, unit="prompt", disable=not show_progress)
            self._collect(opened, waiting, buffer, bar)
        except BaseException:
            for request_id in opened:
                self._controller.abort_request(request_id)
            raise
        finally:
            self._sink.close_buffer([one.request for one in opened.values()])
        return [one.generation() for one in opened.values()]

    def stream(self, collector: Collector) -> Generator[str]:
        """Yield the text of a request with one sequence as it is generated."""
        request = collector.request
        buffer = self._sink.open_buffer([request], is_watched=True)
        try:
            while not self._submit(request):
                time.sleep(HELD_POLL_S)
            while not collector.is_finished:
                for event in buffer.take_events():
                    if text := self._push(collector, [event]).text:
                        yield text
        finally:
            self._controller.abort_request(request.id)
            self._sink.close_buffer([request])

    def _submit_all(
        self, collectors: Iterable[Collector], buffer: EventBuffer, opened: dict[str, Collector]
    ) -> deque[Request]:
        """Submit until the queue is full, and return the requests that did not fit.

        Those of all collectors are in `opened`, by id, even if making one fails.
        """
        waiting: deque[Request] = deque()
        for one in collectors:
            request = one.request
            opened[request.id] = one
            self._sink.add_requests(buffer, [request])
            if waiting or not self._submit(request):
                waiting.append(request)
        return waiting

    def _collect(
        self,
        opened: Mapping[str, Collector],
        waiting: deque[Request],
        buffer: EventBuffer,
        bar: tqdm[NoReturn],
    ) -> None:
        num_open = len(opened)
        with bar:
            while num_open:
                # A queue filled by other calls drains without an event for this one.
                taken = buffer.take_events(HELD_POLL_S if waiting else None)
                for events in _by_sequence(taken):
                    collector = opened[events[0].request_id]
                    if collector.is_finished:
                        continue
                    self._push(collector, events)
                    if collector.is_finished:
                        num_open -= 1
                        bar.update()
                while waiting and self._submit(waiting[0]):
                    waiting.popleft()

    def _submit(self, request: Request) -> bool:
        """Submit a request, and return whether the queue has room for it."""
        try:
            self._controller.submit_request(request)
        except OverloadedError:
            return False
        return True

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
