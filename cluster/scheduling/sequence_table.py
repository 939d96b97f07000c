"""The sequences by state: queues and rows, and the transitions between them."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from cluster.scheduling.fair_queue import FairQueue
from cluster.scheduling.sequence import (
    FINISHED,
    ActiveRequest,
    Arriving,
    Held,
    Placed,
    Quarantined,
    Running,
    Sequence,
    SequenceState,
    Swapped,
    Waiting,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.scheduling.fair_queue import Backlog
    from cluster.scheduling.kv_manager import KvManager

__all__ = ["SequenceTable"]

_order = attrgetter("order")


class SequenceTable:
    """Keeps each sequence in the queue of its state."""

    __slots__ = (
        "_free_rows",
        "_kv",
        "_queues",
        "_started",
        "arriving",
        "backlog",
        "num_held",
        "num_rows",
        "num_starts",
        "quarantined",
        "requests",
        "running",
        "swapped",
        "waiting",
    )

    def __init__(self, kv: KvManager, *, num_rows: int, backlog: Backlog) -> None:
        self._kv = kv
        self.requests: dict[str, ActiveRequest] = {}
        self.backlog = backlog
        """Requests of which no sequence has started."""
        self.waiting = FairQueue[Sequence]()
        self.running: list[Sequence] = []
        """Running sequences by `order`, as in the other lists."""
        self.swapped: list[Sequence] = []
        self.arriving: list[Sequence] = []
        self.quarantined: list[Sequence] = []
        self._queues = {
            Running: self.running,
            Swapped: self.swapped,
            Arriving: self.arriving,
            Quarantined: self.quarantined,
        }
        self.num_rows = num_rows
        """Sequences that can run at once."""
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._started: list[ActiveRequest] = []
        self.num_starts = 0
        """Starts of sequences so far."""
        self.num_held = 0
        """Sequences that wait for the prompt of a sibling."""

    @property
    def has_free_row(self) -> bool:
        """Whether another sequence can run."""
        return bool(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        """Rows that no sequence has."""
        return len(self._free_rows)

    @property
    def num_taken_rows(self) -> int:
        """Number of rows in use."""
        return self.num_rows - len(self._free_rows)

    def unfinished(self, request_id: str) -> Iterator[Sequence]:
        """Yield the sequences of a request that have not ended."""
        active = self.requests.get(request_id)
        for sequence in () if active is None else active.sequences:
            if sequence.state is not FINISHED:
                yield sequence

    def add_request(self, active: ActiveRequest) -> None:
        """Queue the sequences of a request, except sequences that wait for a sibling's prompt.

        A quarantined request waits for `readmit_request`.
        """
        self.requests[active.request.id] = active
        self.num_held += len(active.held)
        share = self.waiting.open_share(active.request.tenant)
        self.backlog.add_request(active.request.tenant, len(active.request.prompt_token_ids))
        for sequence in active.sequences:
            sequence.share = share
            if isinstance(sequence.state, Waiting):
                self._queue_sequence(sequence)

    def quarantine_request(self, active: ActiveRequest) -> None:
        """Take rows and blocks from a request's sequences, which do not run until readmitted."""
        active.is_quarantined = True
        for sequence in active.sequences:
            if isinstance(sequence.state, Held) or sequence.state is FINISHED:
                continue
            self._kv.release(sequence)
            sequence.forget_computed()
            self._move_sequence(sequence, Quarantined())
            # They may no longer wait for its prompt.
            self.release_siblings(sequence)

    def readmit_request(self, active: ActiveRequest) -> None:
        """Queue the sequences of a quarantined request."""
        active.is_quarantined = False
        for sequence in active.sequences:
            if isinstance(sequence.state, Quarantined):
                self._move_sequence(sequence, Waiting())

    def start_sequence(self, sequence: Sequence, *, copies_step: int | None) -> None:
        """Give a queued sequence a row; it arrives with the copies of a step, or runs."""
        row = self._free_rows.pop()
        self.num_starts += 1
        sequence.share.num_rows += 1
        if copies_step is None:
            self._move_sequence(sequence, Running(row, self.num_starts))
        else:
            self._move_sequence(sequence, Arriving(row, self.num_starts, copies_step))
        active = sequence.active
        if active.is_queued:
            active.is_queued = False
            self.backlog.start_request(active.request.tenant, sequence.num_prompt_tokens)
            self._started.append(active)

    def take_started(self) -> list[ActiveRequest]:
        """Return the requests that started since the last call."""
        started, self._started = self._started, []
        return started

    def run_arrived(self, step: int) -> list[Sequence]:
        """Make the sequences that were swapped in up to `step` running, and return them."""
        arrived = []
        for sequence in [*self.arriving]:
            state = sequence.state
            assert isinstance(state, Arriving)
            if state.ready_step <= step:
                self._move_sequence(sequence, Running(state.row, state.start_number))
                arrived.append(sequence)
        return arrived

    def preempt_sequence(self, sequence: Sequence, state: Waiting | Swapped) -> None:
        """Take the row of a running sequence, which becomes waiting or swapped."""
        self._move_sequence(sequence, state)
        self.release_siblings(sequence)

    def recompute_swapped(self, sequence: Sequence) -> None:
        """Make a swapped sequence waiting, since it has lost its blocks."""
        sequence.forget_computed()
        self._move_sequence(sequence, Waiting(sequence.state.starved_since))

    def remove_sequence(self, sequence: Sequence) -> None:
        """Finish a sequence and release its row and blocks."""
        active = sequence.active
        self._kv.release(sequence)
        old, sequence.state = sequence.state, FINISHED
        if isinstance(old, Held):
            active.held.remove(sequence)
            self.num_held -= 1
        else:
            self._leave_state(sequence, old)
        active.num_unfinished -= 1
        if active.num_unfinished:
            self.release_siblings(sequence)
            return
        del self.requests[sequence.request_id]
        self.waiting.close_share(sequence.share)
        if active.is_queued:
            self.backlog.drop_request(active.request.tenant, sequence.num_prompt_tokens)

    def release_siblings(self, sequence: Sequence) -> None:
        """Queue the siblings that waited for a sequence's prompt."""
        active = sequence.active
        if sequence.index or not active.held:
            return
        for sibling in active.held:
            self._queue_sequence(sibling)
        self.num_held -= len(active.held)
        active.held = []

    def reset_sequences(self, *, keeps_cpu_pool: bool = False) -> None:
        """Make every sequence waiting with the tokens it has, and every row and block free."""
        self._kv.clear(keeps_cpu_pool=keeps_cpu_pool)
        self._free_rows = list(range(self.num_rows - 1, -1, -1))
        self.waiting.clear()
        for queue in self._queues.values():
            queue.clear()
        for active in self.requests.values():
            for sequence in active.sequences:
                if sequence.state is not FINISHED:
                    self._reset_sequence(sequence)

    def _reset_sequence(self, sequence: Sequence) -> None:
        sequence.drop_blocks()
        sequence.forget_computed()
        # Tokens in flight are lost and will be sampled again.
        sequence.prefill_end = len(sequence.token_ids)
        if not isinstance(sequence.state, Held):
            self._queue_sequence(sequence)

    def _queue_sequence(self, sequence: Sequence) -> None:
        """Make a sequence that is in no queue waiting, or quarantined with its request."""
        is_quarantined = sequence.active.is_quarantined
        self._enter_state(sequence, Quarantined() if is_quarantined else Waiting())

    def _move_sequence(self, sequence: Sequence, state: SequenceState) -> None:
        """Move a sequence to the queue of another state; it keeps its row in placed states."""
        old = sequence.state
        self._enter_state(sequence, state)
        self._leave_state(sequence, old)

    def _enter_state(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.state = state
        if isinstance(state, Waiting):
            self.waiting.insert(sequence)
        else:
            insort(self._queues[type(state)], sequence, key=_order)

    def _leave_state(self, sequence: Sequence, old: SequenceState) -> None:
        if isinstance(old, Waiting):
            self.waiting.remove(sequence)
            return
        queue = self._queues[type(old)]
        index = bisect_left(queue, sequence.order, key=_order)
        assert queue[index] is sequence
        del queue[index]
        if isinstance(old, Placed) and not isinstance(sequence.state, Placed):
            self._free_rows.append(old.row)
            sequence.share.num_rows -= 1
