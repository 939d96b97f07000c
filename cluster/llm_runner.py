"""Runs the requests of `LLM` until they end, on the thread of the caller."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from tqdm import tqdm

from cluster.call_width import CallWidth
from pagedray.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Sequence
    from typing import NoReturn

    from cluster.engine.controller import Controller
    from cluster.engine.event_buffers import EventDispatcher
    from cluster.generation import Collector, Generation
    from cluster.scheduling.event import TokenEvent
    from cluster.serving.text.text_stream import SequenceOutput
    from pagedray.request import Request

__all__ = ["HELD_POLL_S", "RequestRunner"]

HELD_POLL_S = 0.05
"""Time between two attempts to submit what the queue has no room for."""


class RequestRunner:
    """Submits requests while the queue has room, and passes their events to their collectors."""

    def __init__(self, controller: Controller, sink: EventDispatcher) -> None:
        self._controller = controller
        self._sink = sink

    def complete(
        self,
        parts: Iterable[Sequence[Collector]],
        *,
        lengths: Sequence[int],
        is_watched: bool,
        show_progress: bool = False,
    ) -> list[Generation]:
        """Run the requests of all parts to their end; return results in order.

        They generate at most as many tokens as `lengths` says, the longest first. Those of a part
        run while the next one is made. Tokens are read as they arrive if the call `is_watched`,
        which stop strings need. Raises EngineError if the engine fails, and what making a part
        raises; all of the requests are aborted then.
        """
        with tqdm(total=len(lengths), unit="prompt", disable=not show_progress) as bar:
            width = CallWidth(lengths)
            call = _Call(self._controller, self._sink, bar, width, is_watched=is_watched)
            try:
                for part in parts:
                    call.add_requests(part)
                    call.take_events(0.0)
                return call.finish()
            except BaseException:
                call.abort()
                raise
            finally:
                call.close()

    def stream(self, collector: Collector) -> Generator[str]:
        """Yield the text of a request with one sequence as it is generated."""
        request = collector.request
        buffer = self._sink.open_buffer([request], is_watched=True)
        try:
            while not _submit_if_room(self._controller, request):
                time.sleep(HELD_POLL_S)
            while not collector.is_finished:
                for event in buffer.take_events():
                    if text := _push(self._controller, collector, [event]).text:
                        yield text
        finally:
            self._controller.abort_request(request.id)
            self._sink.close_buffer([request])


class _Call:
    """The requests of one call, of which some may be waiting to be submitted."""

    def __init__(
        self,
        controller: Controller,
        sink: EventDispatcher,
        bar: tqdm[NoReturn],
        width: CallWidth,
        *,
        is_watched: bool,
    ) -> None:
        self._controller = controller
        self._sink = sink
        self._bar = bar
        self._width = width
        self._buffer = sink.open_buffer([], is_watched=is_watched)
        self._collectors: list[Collector] = []
        self._indices: dict[str, int] = {}
        """Places of the collectors, by the ids of their requests."""
        self._waiting: deque[Request] = deque()
        self._num_finished = 0
        self._num_input = 0
        """Prompt tokens of the requests that have ended."""
        self._num_output = 0
        """Generated tokens of the requests that have ended."""
        self._started_s = time.monotonic()

    def add_requests(self, collectors: Sequence[Collector]) -> None:
        """Submit the requests of these collectors once they may run."""
        requests = [one.request for one in collectors]
        first = len(self._indices)
        self._indices.update((one.id, first + place) for place, one in enumerate(requests))
        self._collectors += collectors
        self._sink.add_requests(self._buffer, requests)
        self._waiting += requests
        self._submit_waiting()

    def take_events(self, timeout_s: float | None) -> None:
        """Wait for events and pass them to their collectors. Raises EngineError.

        Without a timeout, it waits until there is one.
        """
        for events in _by_sequence(self._buffer.take_events(timeout_s)):
            index = self._indices[events[0].request_id]
            collector = self._collectors[index]
            if collector.is_finished:
                continue
            _push(self._controller, collector, events)
            if collector.is_finished:
                self._num_finished += 1
                self._width.end(index)
                self._show(collector)
        self._submit_waiting()

    def _show(self, collector: Collector) -> None:
        """Show in the bar that a request has ended, and tokens per second of all that have."""
        if self._bar.disable:
            return
        self._num_input += len(collector.request.prompt_token_ids)
        self._num_output += collector.num_tokens
        seconds = max(time.monotonic() - self._started_s, 1e-9)
        self._bar.set_postfix_str(
            f"est. speed input: {self._num_input / seconds:.2f} toks/s, "
            f"output: {self._num_output / seconds:.2f} toks/s",
            refresh=False,
        )
        self._bar.update()

    def finish(self) -> list[Generation]:
        """Wait for the ends of all requests, and return their results. Raises EngineError."""
        while self._num_finished < len(self._collectors):
            # A queue filled by other calls drains without an event for this one.
            self.take_events(HELD_POLL_S if self._waiting else None)
        return [one.generation() for one in self._collectors]

    def abort(self) -> None:
        """End all requests, also those that were not submitted."""
        for request_id in self._indices:
            self._controller.abort_request(request_id)

    def close(self) -> None:
        """Discard further events."""
        self._sink.close_buffer([one.request for one in self._collectors])

    def _submit_waiting(self) -> None:
        num_waiting = len(self._waiting)
        num_running = len(self._collectors) - num_waiting - self._num_finished
        num_left = self._width.num_to_begin(num_waiting=num_waiting, num_running=num_running)
        while num_left and _submit_if_room(self._controller, self._waiting[0]):
            self._waiting.popleft()
            num_left -= 1


def _submit_if_room(controller: Controller, request: Request) -> bool:
    """Submit a request, and return whether the queue had room for it."""
    try:
        controller.submit_request(request)
    except OverloadedError:
        return False
    return True


def _push(
    controller: Controller, collector: Collector, events: Sequence[TokenEvent]
) -> SequenceOutput:
    output, last = collector.push_events(events), events[-1]
    if output.finish_reason is not None and last.finish_reason is None:
        # A stop string ended it, which the engine does not see.
        controller.finish_sequence(last.request_id, last.index)
    return output


def _by_sequence(events: Iterable[TokenEvent]) -> Collection[Sequence[TokenEvent]]:
    """Return the events of each sequence, which are converted to text at once."""
    found: defaultdict[tuple[str, int], list[TokenEvent]] = defaultdict(list)
    for event in events:
        found[event.request_id, event.index].append(event)
    return found.values()
