"""The sequences by state: queues and rows, and the transitions between them."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from cluster.scheduling.fair_queue import FairQueue
from cluster.scheduling.sequence import ActiveRequest, Sequence, SequenceState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cluster.scheduling.fair_queue import Backlog
    from cluster.scheduling.kv_manager import KvManager

__all__ = ["SequenceQueue", "SequenceTable"]

_order = attrgetter("order")


class SequenceTable:
    """Keeps each sequence in the queue of its state."""

    __slots__ = (
        "_free_rows",
        "_kv",
        "_started",
        "arriving",
        "backlog",
        "num_held",
        "num_rows",
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
        self.running = SequenceQueue()
        self.swapped = SequenceQueue()
        self.arriving = SequenceQueue()
        self.quarantined = SequenceQueue()
        self.num_rows = num_rows
        """Sequences that can run at once."""
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._started: list[ActiveRequest] = []
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
            if sequence.state is not SequenceState.FINISHED:
                yield sequence

    def add_request(self, active: ActiveRequest) -> None:
        """Queue the sequences of a request, except sequences that wait for a sibling's prompt.

        A quarantined request waits for `readmit_request`.
        """
        self.requests[active.request.id] = active
        self.num_held += len(active.held)
        active.share = self.waiting.open_share(active.request.tenant)
        self.backlog.add_request(active.request.tenant, len(active.request.prompt_token_ids))
        for sequence in active.sequences:
            if sequence.state is SequenceState.WAITING:
                self._queue_sequence(sequence)

    def quarantine_request(self, active: ActiveRequest) -> None:
        """Take rows and blocks from a request's sequences, which do not run until readmitted."""
        active.is_quarantined = True
        for sequence in active.sequences:
            if sequence.state in (SequenceState.HELD, SequenceState.FINISHED):
                continue
            self._queue_of(sequence).remove(sequence)
            if sequence.row >= 0:
                self._end_row(sequence)
            self._kv.release(sequence)
            sequence.forget_computed()
            self._queue_sequence(sequence)
            # They may no longer wait for its prompt.
            self.release_siblings(sequence)

    def readmit_request(self, active: ActiveRequest) -> None:
        """Queue the sequences of a quarantined request."""
        active.is_quarantined = False
        for sequence in active.sequences:
            if sequence.state is SequenceState.QUARANTINED:
                self.quarantined.remove(sequence)
                self._queue_sequence(sequence)

    def start_sequence(self, sequence: Sequence, state: SequenceState) -> None:
        """Give a waiting or swapped sequence a row."""
        self._queue_of(sequence).remove(sequence)
        sequence.own_tokens()
        sequence.row = self._free_rows.pop()
        sequence.share.num_rows += 1
        sequence.state = state
        self._queue_of(sequence).insert(sequence)
        if sequence.active.is_queued:
            sequence.active.is_queued = False
            self.backlog.start_request(sequence.active.request.tenant, sequence.num_prompt_tokens)
            self._started.append(sequence.active)

    def take_started(self) -> list[ActiveRequest]:
        """Return the requests that started since the last call."""
        started, self._started = self._started, []
        return started

    def run_arrived(self, step: int) -> list[Sequence]:
        """Make the sequences that were swapped in up to `step` running, and return them."""
        arrived = [sequence for sequence in self.arriving if sequence.ready_step <= step]
        for sequence in arrived:
            self.arriving.remove(sequence)
            sequence.state = SequenceState.RUNNING
            self.running.insert(sequence)
        return arrived

    def preempt_sequence(self, sequence: Sequence, state: SequenceState) -> None:
        """Take the row of a running sequence, which becomes waiting or swapped."""
        self.running.remove(sequence)
        self._end_row(sequence)
        sequence.state = state
        self._queue_of(sequence).insert(sequence)
        self.release_siblings(sequence)

    def recompute_swapped(self, sequence: Sequence) -> None:
        """Make a swapped sequence waiting, since it has lost its blocks."""
        self.swapped.remove(sequence)
        sequence.forget_computed()
        self._queue_sequence(sequence)

    def remove_sequence(self, sequence: Sequence) -> None:
        """Finish a sequence and release its row and blocks."""
        active = sequence.active
        if sequence.state is SequenceState.HELD:
            active.held.remove(sequence)
            self.num_held -= 1
        else:
            self._queue_of(sequence).remove(sequence)
        if sequence.row >= 0:
            self._end_row(sequence)
        self._kv.release(sequence)
        sequence.state = SequenceState.FINISHED
        active.num_unfinished -= 1
        if active.num_unfinished:
            self.release_siblings(sequence)
            return
        del self.requests[sequence.request_id]
        self.waiting.close_share(active.share)
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

    def reset_sequences(self, damaged: Collection[int] | None = None) -> None:
        """Make every sequence waiting with the tokens it has, and every row and block free.

        For `damaged`, see `KvManager.clear`.
        """
        self._kv.clear(damaged)
        self._free_rows = list(range(self.num_rows - 1, -1, -1))
        for queue in (self.waiting, self.running, self.swapped, self.arriving, self.quarantined):
            queue.clear()
        for active in self.requests.values():
            for sequence in active.sequences:
                if sequence.state is not SequenceState.FINISHED:
                    self._reset_sequence(sequence)

    def _reset_sequence(self, sequence: Sequence) -> None:
        self._kv.disown(sequence)
        sequence.forget_computed()
        # Tokens in flight are lost and will be sampled again.
        sequence.prefill_end = len(sequence.token_ids)
        sequence.row = -1
        sequence.ready_step = -1
        sequence.donor_row = -1
        sequence.starved_since = -1
        if sequence.state is not SequenceState.HELD:
            self._queue_sequence(sequence)

    def _queue_sequence(self, sequence: Sequence) -> None:
        """Make a sequence waiting, or quarantined with its request."""
        is_quarantined = sequence.active.is_quarantined
        sequence.state = SequenceState.QUARANTINED if is_quarantined else SequenceState.WAITING
        self._queue_of(sequence).insert(sequence)

    def _end_row(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.share.num_rows -= 1

    def _queue_of(self, sequence: Sequence) -> SequenceQueue | FairQueue[Sequence]:
        match sequence.state:
            case SequenceState.WAITING:
                return self.waiting
            case SequenceState.RUNNING:
                return self.running
            case SequenceState.SWAPPED:
                return self.swapped
            case SequenceState.QUARANTINED:
                return self.quarantined
            case state:
                assert state is SequenceState.ARRIVING
                return self.arriving


class SequenceQueue:
    """Sequences sorted by `order`."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def clear(self) -> None:
        """Remove all sequences."""
        self._sequences.clear()

    def insert(self, sequence: Sequence) -> None:
        """Add a sequence at the place of its `order`."""
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must be in the queue."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index] is sequence
        del self._sequences[index]
