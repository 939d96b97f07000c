"""Records the times and tokens of each call, and reports them when it ends.

It costs a few microseconds per call, and a fraction of one per output.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.serving.inputs import MAX_CLIENT_ID_LENGTH
from cluster.serving.telemetry.call_log import CallReport, outcome_of
from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cluster.serving.inputs import Arrival
    from cluster.serving.telemetry.load_history import LoadRecorder
    from cluster.serving.telemetry.metrics import Metrics
    from pagedray.request import Request

__all__ = ["CallObserver", "CallWatch"]


class CallObserver:
    """Creates the watch of each call and passes on its report."""

    def __init__(
        self,
        metrics: Metrics,
        recorder: LoadRecorder,
        model: str,
        listeners: Sequence[Callable[[CallReport], None]],
    ) -> None:
        """Each listener gets the report of every call, in the event loop's thread."""
        self.metrics = metrics
        self.recorder = recorder
        self.model = model
        self._listeners = tuple(listeners)

    def watch_call(self, arrival: Arrival) -> CallWatch:
        """Return the watch of a call that has just arrived."""
        return CallWatch(self, arrival)

    @contextmanager
    def watched(self, arrival: Arrival) -> Iterator[CallWatch]:
        """Watch a call that has just arrived; an error that is raised inside ends it."""
        watch = self.watch_call(arrival)
        try:
            yield watch
        except BaseException as error:
            watch.note_end(error if isinstance(error, PagedRayError) else "cancelled")
            raise

    def report_call(self, report: CallReport) -> None:
        """Count a call and pass its report to the listeners."""
        self.metrics.count_call(report)
        for listener in self._listeners:
            listener(report)


class CallWatch:
    """The times and tokens of one call so far."""

    def __init__(self, observer: CallObserver, arrival: Arrival) -> None:
        self._observer = observer
        self._arrival = arrival
        # An id that is rejected for its length is reported truncated.
        self._id = (arrival.client_id or "")[:MAX_CLIENT_ID_LENGTH]
        self._arrived_s = time.monotonic()
        self._validated_s: float | None = None
        self._started_s: float | None = None
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._requests: tuple[Request, ...] = ()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._num_held_tokens = 0
        self._is_open = False
        self._is_ended = False

    def note_validated(self, num_prompt_tokens: int, requests: Sequence[Request] = ()) -> None:
        """Record that the call is valid; an embedding has no requests."""
        self._validated_s = time.monotonic()
        self._requests = tuple(requests)
        self._num_prompt_tokens = num_prompt_tokens

    def note_open(self, call_id: str) -> None:
        """Record that the engine has accepted the call."""
        self._id = call_id
        self._is_open = True
        self._num_held_tokens = self._num_prompt_tokens + sum(
            request.sampling.n * request.sampling.max_tokens for request in self._requests
        )
        self._observer.metrics.hold_tokens(self._num_held_tokens)

    def add_tokens(self, num_tokens: int, *, num_cached_tokens: int, started_s: float) -> None:
        """Record an output that has just arrived."""
        self._num_cached_tokens = num_cached_tokens
        if self._started_s is None and started_s > 0.0:
            self._started_s = started_s
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        self._num_generated_tokens += num_tokens
        if self._last_s is None:
            self._first_s = now_s
            self._observer.metrics.times.first_token.observe(now_s - self._arrived_s)
            self._observer.recorder.first_token.record(now_s - self._arrived_s)
        else:
            self._observer.metrics.times.between_tokens.record(now_s - self._last_s)
        self._last_s = now_s

    def note_end(self, outcome: str | PagedRayError) -> None:
        """Record the end and report the call, the first time."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._num_held_tokens:
            self._observer.metrics.hold_tokens(-self._num_held_tokens)
        arrival = self._arrival
        self._observer.report_call(
            CallReport(
                operation=arrival.operation,
                origin=arrival.origin,
                tenant=arrival.tenant,
                model=self._observer.model,
                id=self._id,
                sampling=self._requests[0].sampling if self._requests else None,
                outcome=outcome if isinstance(outcome, str) else outcome_of(outcome),
                is_rejected=not self._is_open,
                arrived_s=self._arrived_s,
                validated_s=self._validated_s,
                started_s=self._started_s,
                first_token_s=self._first_s,
                last_token_s=self._last_s,
                ended_s=time.monotonic(),
                num_sequences=sum(request.sampling.n for request in self._requests),
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
                num_generated_tokens=self._num_generated_tokens,
            )
        )
