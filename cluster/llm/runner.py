"""Runs the requests of `LLM` on the thread of the caller: generation, embeddings and scores."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from tqdm import tqdm

from cluster.llm.prompts import read_texts, run_apart
from cluster.serving.embedding_validator import MAX_PAIRS, MAX_PROMPTS
from pagedray.errors import OverloadedError, invalid_field

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Sequence
    from typing import NoReturn

    import numpy as np
    from numpy.typing import NDArray

    from cluster.engine.embedding_scheduler import EmbeddingRequest
    from cluster.engine.engine_loop import EngineLoop
    from cluster.engine.event_buffers import EventDispatcher
    from cluster.llm.generation import Collector, Generation
    from cluster.scheduling.event import TokenEvent
    from cluster.serving.embedding_validator import EmbeddingValidator, ScoreValidator
    from cluster.serving.inputs import EmbeddingInput, ScoreInput
    from cluster.serving.text.text_stream import SequenceOutput
    from pagedray.request import Request

__all__ = [
    "CallWidth",
    "RequestRunner",
    "embed_prompts",
    "longest_first",
    "read_pairs",
    "score_pairs",
]

HELD_POLL_S = 0.05
"""Time between two attempts to submit requests to a full queue."""
_NUM_LEAST = 256
"""Requests that may always run: up to this many, a GPU spends most of a step reading weights."""
_EXTRA_SHARE = 16
"""The share of the requests that would end with the longest request is a sixteenth larger, since
requests that begin later also have prompts.
"""
_GROUP_SHARE = 8
"""Requests begin in groups of an eighth of the running requests, since a step with prompts takes
longer to launch.
"""


class RequestRunner:
    """Submits requests while the queue has room, and passes their events to their collectors."""

    def __init__(self, controller: EngineLoop, sink: EventDispatcher) -> None:
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

        They generate at most `lengths` tokens, the longest first. The requests of a part run while
        the next part is made. Tokens are read as they arrive if the call `is_watched`, which stop
        strings need. Raises EngineError if the engine fails, and errors of making a part; all of
        the requests are aborted then.
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
        controller: EngineLoop,
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

        Without a timeout, it waits until there is an event.
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
            # A queue filled by other calls drains without an event for this call.
            self.take_events(HELD_POLL_S if self._waiting else None)
        return [one.generation() for one in self._collectors]

    def abort(self) -> None:
        """End all requests, also requests that were not submitted."""
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


def _submit_if_room(controller: EngineLoop, request: Request) -> bool:
    """Submit a request, and return whether the queue had room for it."""
    try:
        controller.submit_request(request)
    except OverloadedError:
        return False
    return True


def _push(
    controller: EngineLoop, collector: Collector, events: Sequence[TokenEvent]
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


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the indices of `lengths`, largest first; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


class CallWidth:
    """Limits how many requests of a call run at once, so that short requests are left for its end.

    Every step reads all weights, however few sequences it has. If all requests began together, only
    the longest would be left at the end, in steps that take nearly as long as full steps. The
    longest therefore begin first, and the others follow when requests have ended (the longest
    processing time rule; Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). As many run
    at once as let all of them end with the longest: all of them if they are equally long.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """The requests generate at most this many tokens each, the longest first."""
        self._lengths = lengths
        self._num_tokens = sum(lengths)
        self._is_ended = bytearray(len(lengths))
        self._first = 0
        """The index of the longest request that has not ended."""
        self._num_most = _NUM_LEAST
        self._widen()

    def end(self, index: int) -> None:
        """Note that the request of this index has ended."""
        self._is_ended[index] = True
        self._num_tokens -= self._lengths[index]
        if index == self._first:
            self._first = self._is_ended.find(0, index)
            self._widen()

    def num_to_begin(self, *, num_waiting: int, num_running: int) -> int:
        """Return how many of the waiting requests may begin, which are none or a group of them."""
        num_free = min(self._num_most - num_running, num_waiting)
        num_grouped = min(max(self._num_most // _GROUP_SHARE, 1), num_waiting)
        return num_free if num_free >= num_grouped else 0

    def _widen(self) -> None:
        """Let more requests run if the remaining requests are shorter than expected."""
        if self._num_tokens:
            num_most = -(-self._num_tokens // self._lengths[self._first])
            self._num_most = max(self._num_most, num_most + num_most // _EXTRA_SHARE)


def embed_prompts(
    engine: EngineLoop, validator: EmbeddingValidator, given: EmbeddingInput
) -> list[list[float]]:
    """Return the vectors of any number of prompts. Raises InvalidRequestError or EngineError."""
    vectors: list[list[float]] = []
    for first in range(0, len(given.prompts), MAX_PROMPTS):
        part = replace(given, prompts=given.prompts[first : first + MAX_PROMPTS])
        vectors += _result_of(engine, run_apart(validator.validate(part))).tolist()
    return vectors


def score_pairs(engine: EngineLoop, validator: ScoreValidator, given: ScoreInput) -> list[float]:
    """Return the scores of any number of pairs. Raises InvalidRequestError or EngineError."""
    scores: list[float] = []
    for first in range(0, len(given.pairs), MAX_PAIRS):
        part = replace(given, pairs=given.pairs[first : first + MAX_PAIRS])
        scores += _result_of(engine, run_apart(validator.validate(part)))[:, 0].tolist()
    return scores


def read_pairs(
    queries: str | Sequence[str], documents: str | Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Return the query of each document, and the document. Raises InvalidRequestError."""
    others, firsts = read_texts(documents, "documents"), read_texts(queries, "queries")
    if isinstance(queries, str):
        firsts *= len(others)
    if len(firsts) != len(others):
        raise invalid_field(
            "queries", f"must have one entry per document, {len(others)}, not {len(firsts)}."
        )
    return tuple(zip(firsts, others, strict=True))


def _result_of(engine: EngineLoop, request: EmbeddingRequest) -> NDArray[np.float32]:
    """Submit a request as soon as the queue has room; return its result, `[num_texts, size]`."""
    while True:
        try:
            answer = engine.submit_texts(request)
        except OverloadedError:
            time.sleep(HELD_POLL_S)
        else:
            return answer.result()
