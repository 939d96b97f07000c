"""Decides which sequence is served next, which waits and which is preempted.

| question | rule | code |
| --- | --- | --- |
| served next | lowest clock of the tenant, then priority, then arrival | `FairQueue`, `is_before` |
| overtakes | the next sequences that find room, if it leaves spare blocks | `SkippedSequences` |
| waits | all, once overtakers hold what a starved sequence lacks | `StarvationGuard` |
| preempted for a running one | last behind it, of the most served tenant | `choose_victim` |
| preempted for a waiting one | lower priority, or two rows more | `choose_preempted` |
| preempted for a starved one | overtakers, the last first, after a grace | `Preemptor.reclaim` |
| swapped or dropped | what takes less time, or `--preemption` says | `SwapCosts.choose_swap` |

A sequence that was preempted `MAX_PREEMPTIONS` times is preempted for a running sequence only if
all sequences behind that are protected, too. Under each rule some sequence is never preempted: the
first running sequence, the first sequence of a tenant, and the starved sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.scheduling.fault_recovery import Blame
from cluster.scheduling.sequence import Placed, Queued, Sequence, SequenceState, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cluster.scheduling.costs import SwapCosts
    from cluster.scheduling.fair_queue import FairQueue, Share
    from cluster.scheduling.kv_manager import KvManager
    from cluster.scheduling.sequence_table import SequenceTable
    from pagedray.batch import BlockCopy
    from pagedray.config import Preemption

__all__ = [
    "GRACE_STEPS",
    "MAX_PREEMPTIONS",
    "MAX_SKIPPED",
    "AdmissionSize",
    "Preemptor",
    "SkippedSequences",
    "StarvationGuard",
    "choose_preempted",
    "choose_victim",
    "is_before",
]

MAX_PREEMPTIONS = 3
"""Preemptions after which a sequence is protected."""
MAX_SKIPPED = 4
"""Swapped or preempting sequences that a step examines, which bounds its time."""
_MAX_SKIPPED = 8
"""Waiting sequences without room that a step skips."""
_MAX_SKIPPED_OF_TENANT = 4
"""More than 1, so that a large prompt does not stop its own tenant either."""
_SPARE_BLOCKS = 4
"""Blocks for each running sequence that overtakers leave free."""
GRACE_STEPS = 16
"""Steps for which overtakers may continue, since many end by themselves."""
_STEPS_PER_CHECK = 4
"""Steps between two looks at the blocks of overtakers."""
_MAX_HEADROOM = 16
"""The most blocks that a preempted sequence gets for its next tokens when it starts again."""


class Preemptor:
    """Chooses sequences to preempt, and how."""

    def __init__(
        self,
        kv: KvManager,
        sequence_table: SequenceTable,
        size: AdmissionSize,
        *,
        preemption: Preemption,
        swap_costs: SwapCosts,
    ) -> None:
        self._kv = kv
        self._table = sequence_table
        self._size = size
        self._preemption = preemption
        self._swap_costs = swap_costs
        self.guard = size.guard
        """The starved sequence, and its overtakers."""
        self.pending: SequenceState | None = None
        """The state of the waiting sequence for which others were preempted last."""
        self.swap_outs: list[BlockCopy] = []
        """The copies of the step that is being planned."""
        self._step = 0
        self._num_stalled = 0
        """Blocks for which running sequences wait a step."""
        self.num_swap_preemptions = 0
        self.num_recompute_preemptions = 0

    def begin_step(self, step: int) -> None:
        """Begin the plan of a step."""
        self._step = step
        self._num_stalled = 0
        self.swap_outs = []
        if self.guard.starved is not None:
            self._reclaim()

    def make_room(
        self, sequence: Sequence, allocate: Callable[[Sequence], list[int] | None]
    ) -> list[int] | None:
        """Return the blocks that a running sequence gets, or None if it waits a step.

        `allocate` returns None if too few blocks are free.
        """
        while (added := allocate(sequence)) is None:
            num_groups = self._kv.groups.num_groups
            # Blocks being swapped out may suffice for the stalled sequences and this sequence.
            if self._kv.pool.num_in_transit >= self._num_stalled + num_groups:
                break
            victim = choose_victim(self._table.running, sequence)
            if victim is None:
                break
            victim.num_preemptions += 1
            self._preempt(victim)
        else:
            return added
        self._num_stalled += self._kv.groups.num_groups
        return None

    def may_preempt(self, head: Sequence, preempting: Collection[Sequence]) -> bool:
        """Return whether a waiting sequence may take the row of another sequence."""
        if head.num_pending or head.awaits_mask:
            return False
        if head.state is self.pending:
            return True
        if self._table.swapped and _precedes(self._table.swapped[0], head):
            return False
        return self._choose_preempted(head, preempting) is not None

    def preempt_for(self, head: Sequence, preempting: Collection[Sequence]) -> bool:
        """Preempt a sequence for a waiting sequence; return False if no victim is found."""
        victim = self._choose_preempted(head, preempting)
        if victim is None:
            return False
        # Sequences of other tenants are protected by the rows that their tenants keep.
        victim.num_preemptions += victim.share is head.share
        self.pending = head.state
        self._preempt(victim)
        return True

    def lacks_blocks(self, head: Sequence) -> bool:
        """Return whether a waiting sequence lacks blocks, and its tenant may have that many."""
        num_needed = self._kv.groups.blocks_for(self._size.num_tokens_to_hold(head))
        num_tenants = len({sequence.share for sequence in self._table.running} | {head.share})
        if num_needed > self._kv.pool.num_blocks // num_tenants:
            return False
        return self._size.num_lacking(head) > 0

    def _reclaim(self) -> None:
        """Take back the room of overtakers of the starved sequence, after the grace steps."""
        guard = self.guard
        starved = guard.starved
        if starved is None or self._step % _STEPS_PER_CHECK:
            return
        overtakers = guard.overtakers(starved)
        num_lacking = self._size.num_lacking(starved)
        # Each also has an entry's blocks left free for it.
        num_groups = self._kv.groups.num_groups
        numbers = [self._kv.num_owned_alone(sequence) + num_groups for sequence in overtakers]
        if not guard.note_reserved(self._step, has_enough=num_lacking <= sum(numbers)):
            return
        lacks_row = not self._table.has_free_row
        for sequence, number in zip(overtakers, numbers, strict=True):
            if num_lacking <= 0 and not lacks_row:
                return
            num_lacking -= number
            lacks_row = False
            sequence.num_preemptions += 1
            self._preempt(sequence)

    def _choose_preempted(
        self, head: Sequence, preempting: Collection[Sequence]
    ) -> Sequence | None:
        """Return a sequence to preempt for the row of a waiting sequence, or None."""
        table = self._table
        if not table.running:
            return None
        num_own = head.share.num_rows
        # In O(1) if all rows are its own tenant's, which is the rule.
        if num_own == table.num_taken_rows and table.running[-1].priority <= head.priority:
            return None
        num_own += sum(sequence.share is head.share for sequence in preempting)
        return choose_preempted(table.running, head, num_own=num_own)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the row and blocks of a running sequence."""
        with Blame(sequence):
            self._swap_or_release(sequence)

    def _swap_or_release(self, sequence: Sequence) -> None:
        if self._kv.can_swap_out(sequence) and self._is_to_swap(sequence):
            swapped, copies = self._kv.swap_out(sequence, self._step)
            self.swap_outs += copies
            self._table.preempt_sequence(sequence, swapped)
            self.num_swap_preemptions += 1
        else:
            if sequence.has_sampled:
                # Verified blocks may stay cached in the CPU pool.
                self._kv.prefixes.mark_verified(sequence)
            self._kv.release(sequence)
            sequence.forget_computed()
            self._table.preempt_sequence(sequence, Waiting())
            self.num_recompute_preemptions += 1

    def _is_to_swap(self, sequence: Sequence) -> bool:
        """Return whether to swap a sequence out, given room in the CPU pool."""
        if self._preemption != "auto":
            return self._preemption == "swap"
        if self._swap_costs.is_measured and self._kv.keeps_released(sequence):
            return False
        num_shared = self._kv.num_shared(sequence)
        first_position = num_shared * self._kv.block_size
        return self._swap_costs.choose_swap(
            num_blocks=self._kv.num_unshared(sequence, num_shared)
            + self._kv.groups.num_state_blocks,
            first_position=first_position,
            num_tokens=sequence.num_computed - first_position,
        )


def _precedes(swapped: Sequence, head: Sequence) -> bool:
    """Return whether a swapped sequence comes before a waiting sequence."""
    if swapped.share is head.share:
        return swapped.priority <= head.priority
    return swapped.share.time <= head.share.time


class AdmissionSize:
    """The number of blocks that a sequence needs to start."""

    __slots__ = ("_kv", "_table", "guard")

    def __init__(self, kv: KvManager, sequence_table: SequenceTable) -> None:
        self._kv = kv
        self._table = sequence_table
        self.guard = StarvationGuard(sequence_table)

    def num_tokens_to_hold(self, sequence: Sequence) -> int:
        """Return the number of tokens that a sequence gets blocks for when it starts."""
        length = sequence.length
        if not sequence.num_preemptions:
            return length
        # A sequence that lost its blocks more often runs longer before it needs another block.
        num_blocks = min(1 << sequence.num_preemptions, _MAX_HEADROOM)
        # The last token is never computed.
        num_tokens = min(length + num_blocks * self._kv.block_size, sequence.max_length - 1)
        return max(num_tokens, length)

    def measure(self, sequence: Sequence) -> tuple[int, int]:
        """Return the tokens that a sequence gets blocks for, and the blocks to leave free.

        Blocks are left free so that a new sequence is not preempted at once.
        """
        num_spare = len(self._table.running) + len(self._table.arriving)
        if self.guard.starved not in (None, sequence):
            num_spare *= _SPARE_BLOCKS
        return self.num_tokens_to_hold(sequence), num_spare * self._kv.groups.num_groups

    def num_lacking(self, sequence: Sequence) -> int:
        """Return how many blocks a sequence lacks beyond free blocks and blocks in transit."""
        num_tokens, num_spare = self.measure(sequence)
        return self._kv.num_lacking(sequence, num_tokens=num_tokens, num_spare=num_spare)


class StarvationGuard:
    """The sequence that has lacked room for the longest time, and its overtakers."""

    __slots__ = ("_reserved_step", "_since", "_starved", "_table")

    def __init__(self, sequence_table: SequenceTable) -> None:
        self._table = sequence_table
        self._starved: Sequence | None = None
        self._since: int | None = None
        """Starts of sequences before the starved sequence found no room."""
        self._reserved_step: int | None = None
        """The step since which overtakers hold the missing blocks."""

    @property
    def starved(self) -> Sequence | None:
        """The starved sequence, until it starts or ends, or may not run."""
        starved = self._starved
        if starved is not None and starved.state.starved_since != self._since:
            starved = self._starved = self._reserved_step = None
        return starved

    @property
    def is_reserved(self) -> bool:
        """Whether no sequence may overtake the starved sequence."""
        return self._reserved_step is not None and self.starved is not None

    def note_failure(self, sequence: Sequence) -> None:
        """Note that a queued sequence found too few free blocks."""
        state = sequence.state
        assert isinstance(state, Queued)
        if state.starved_since is None:
            state.starved_since = self._table.num_starts
        if self.starved is None:
            self._starved, self._since = sequence, state.starved_since

    def overtakers(self, starved: Sequence) -> list[Sequence]:
        """Return the running sequences that overtook the starved sequence, the last first."""
        return [
            sequence
            for sequence in reversed(self._table.running)
            if self._has_overtaken(sequence)
            and sequence.order > starved.order
            and not sequence.is_ending
        ]

    def note_reserved(self, step: int, *, has_enough: bool) -> bool:
        """Note whether overtakers hold the missing blocks; return whether to take them back."""
        if not has_enough:
            self._reserved_step = None
            return False
        if self._reserved_step is None:
            self._reserved_step = step
        return step - self._reserved_step >= GRACE_STEPS

    def _has_overtaken(self, sequence: Sequence) -> bool:
        assert isinstance(sequence.state, Placed)
        return self._since is not None and sequence.state.start_number > self._since


class SkippedSequences:
    """Takes sequences from a fair queue, to find others behind them, and puts them back."""

    __slots__ = ("_counts", "_items", "_queue")

    def __init__(self, queue: FairQueue[Sequence]) -> None:
        self._queue = queue
        self._items: list[Sequence] = []
        self._counts: dict[Share[Sequence], int] = {}

    @property
    def are_any(self) -> bool:
        """Whether a sequence was skipped and not yet put back."""
        return bool(self._items)

    @property
    def is_full(self) -> bool:
        """Whether no more may be skipped, which bounds the time of a step."""
        return len(self._items) >= _MAX_SKIPPED

    def skip(self, sequence: Sequence) -> None:
        """Take a sequence from the queue; the fourth of a tenant hides all others of it."""
        self._items.append(sequence)
        count = self._counts[sequence.share] = self._counts.get(sequence.share, 0) + 1
        self._queue.remove(sequence)
        if count == _MAX_SKIPPED_OF_TENANT:
            self._queue.hide_share(sequence.share)

    def put_back(self) -> None:
        """Put all skipped sequences back into the queue."""
        for sequence in self._items:
            self._queue.insert(sequence)


def is_before(prefill: Sequence, head: Sequence) -> bool:
    """Return whether the rest of a prompt comes before a waiting sequence."""
    return head.share is prefill.share or head.share.time > prefill.share.time


def choose_victim(running: list[Sequence], needy: Sequence) -> Sequence | None:
    """Return the sequence to preempt for `needy`, or None if there is none behind it."""
    victim: Sequence | None = None
    last_protected: Sequence | None = None
    for sequence in reversed(running):
        if sequence is needy:
            break
        if sequence.is_ending:
            continue
        if sequence.num_preemptions >= MAX_PREEMPTIONS:
            last_protected = last_protected or sequence
        elif victim is None or sequence.share.time > victim.share.time:
            victim = sequence
    return victim or last_protected


def choose_preempted(running: list[Sequence], head: Sequence, *, num_own: int) -> Sequence | None:
    """Return a sequence to preempt for the row of a waiting sequence, or None.

    It is a sequence of the same tenant with lower priority that is not protected, or the last
    sequence of the most served tenant, if that tenant has at least two rows more than the `num_own`
    rows of the waiting sequence's tenant. Hence the first sequence of a tenant keeps its row.
    """
    share, victim = head.share, None
    for sequence in reversed(running):
        if sequence.is_ending:
            continue
        if sequence.share is share:
            if sequence.priority > head.priority and sequence.num_preemptions < MAX_PREEMPTIONS:
                return sequence
        elif (
            sequence.share.num_rows >= num_own + 2
            and sequence.share.time > share.time
            and (victim is None or sequence.share.time > victim.share.time)
        ):
            victim = sequence
    return victim
