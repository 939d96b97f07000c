"""The sequences by state: queues and rows, and the transitions between them."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from cluster.scheduling.fair_queue import FairQueue
from cluster.scheduling.sequence import ActiveRequest, Sequence, SequenceState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cluster.scheduling.backlog import Backlog
    from cluster.scheduling.kv_manager import KvManager

__all__ = ["GRACE_STEPS", "MAX_SKIPPED", "SequenceQueue", "SequenceTable", "StarvationGuard"]

MAX_SKIPPED = 4
"""Sequences that may be overtaken in a step, which bounds the time to find a sequence with room."""
GRACE_STEPS = 16
"""Steps for which overtakers may continue, since many end by themselves."""

_order = attrgetter("order")


class SequenceTable:
    """Keeps each sequence in the queue of its state."""

    __slots__ = (
        "_free_rows",
        "_kv",
        "_started",
        "arriving",
        "backlog",
        "guard",
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
        self.guard = StarvationGuard(self.running)
        """Guards a sequence that finds too few blocks."""
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
        self.guard.note_start(sequence)
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
        self.guard.clear()
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


class StarvationGuard:
    """The sequence that has lacked room for the longest time, and its overtakers."""

    __slots__ = ("_num_starts", "_reserved_step", "_running", "starved")

    def __init__(self, running: SequenceQueue) -> None:
        self._running = running
        self._num_starts = 0
        self._reserved_step = -1
        self.starved: Sequence | None = None
        """The sequence that has lacked room for the longest time."""

    @property
    def is_reserved(self) -> bool:
        """Whether no sequence may overtake the starved sequence."""
        return self._reserved_step >= 0

    def note_failure(self, sequence: Sequence) -> None:
        """Note that a sequence found too few free blocks."""
        if sequence.starved_since < 0:
            sequence.starved_since = self._num_starts
        if self.starved is None:
            self.starved = sequence

    def note_start(self, sequence: Sequence) -> None:
        """Note that a sequence got a row and blocks."""
        self._num_starts += 1
        sequence.start_number = self._num_starts
        sequence.starved_since = -1
        if sequence is self.starved:
            self.clear()

    def find_starved(self) -> Sequence | None:
        """Return the starved sequence, which is forgotten if it has ended or may not run."""
        starved = self.starved
        if starved is None or starved.state in (SequenceState.WAITING, SequenceState.SWAPPED):
            return starved
        self.clear()
        return None

    def overtakers(self, starved: Sequence) -> list[Sequence]:
        """Return the running sequences that overtook the starved sequence, the last first."""
        return [
            sequence
            for sequence in reversed(self._running)
            if sequence.start_number > starved.starved_since
            and sequence.order > starved.order
            and not sequence.is_ending
        ]

    def note_reserved(self, step: int, *, has_enough: bool) -> bool:
        """Note whether overtakers hold the missing blocks; return whether to take them back."""
        if not has_enough:
            self._reserved_step = -1
        elif self._reserved_step < 0:
            self._reserved_step = step
        return has_enough and step - self._reserved_step >= GRACE_STEPS

    def clear(self) -> None:
        """Forget the starved sequence."""
        self.starved = None
        self._reserved_step = -1


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
