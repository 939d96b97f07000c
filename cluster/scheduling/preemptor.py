"""Takes rows and blocks from running sequences, for others.

A running sequence that needs a block takes blocks of a sequence behind it. A waiting sequence may
take a row, and blocks, of a tenant that has more rows than its own, and of a lower priority within
its tenant. A starved sequence takes back the blocks of its overtakers, as `StarvationGuard` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.scheduling.fault_recovery import Blame
from cluster.scheduling.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from cluster.scheduling.kv_manager import KvManager
    from cluster.scheduling.plan_draft import PlanDraft
    from cluster.scheduling.sequence_table import SequenceQueue, SequenceTable
    from cluster.scheduling.swap_costs import SwapCosts
    from pagedray.config import Preemption

__all__ = ["MAX_PREEMPTIONS", "AdmissionSize", "Preemptor", "choose_preempted", "choose_victim"]

_STEPS_PER_CHECK = 4
"""Steps between two looks at the blocks of overtakers."""
_SPARE_BLOCKS = 4
"""Free blocks to leave per running sequence when a sequence overtakes a starved one."""
_MAX_HEADROOM = 16
"""The most blocks that a preempted sequence gets for its next tokens when it starts again."""

MAX_PREEMPTIONS = 3
"""Preemptions after which a sequence is protected."""


class Preemptor:
    """Chooses sequences to preempt, and how."""

    def __init__(
        self,
        kv: KvManager,
        sequence_table: SequenceTable,
        room: AdmissionSize,
        *,
        preemption: Preemption,
        swap_costs: SwapCosts,
    ) -> None:
        self._kv = kv
        self._table = sequence_table
        self._size = room
        self._preemption = preemption
        self._swap_costs = swap_costs
        self.pending_preemptor: Sequence | None = None
        """The waiting sequence for which others were preempted, until it starts."""
        self.num_swap_preemptions = 0
        self.num_recompute_preemptions = 0

    def make_room(self, sequence: Sequence, draft: PlanDraft) -> int | None:
        """Add a block to a running sequence and return it, or None if it waits a step."""
        while (block := self._kv.append(sequence)) is None:
            # Blocks being swapped out may suffice for the stalled sequences and this sequence.
            if self._kv.pool.num_in_transit > draft.num_stalled:
                break
            victim = choose_victim(self._table.running, sequence)
            if victim is None:
                break
            victim.num_preemptions += 1
            self._preempt(victim, draft)
        else:
            return block
        draft.num_stalled += 1
        return None

    def reclaim(self, draft: PlanDraft) -> None:
        """Take back the room of overtakers of the starved sequence, after the grace steps."""
        guard = self._table.guard
        starved = guard.find_starved()
        if starved is None or draft.step % _STEPS_PER_CHECK:
            return
        overtakers = guard.overtakers(starved)
        num_lacking = self._size.num_lacking(starved)
        # Each also has a block left free for it.
        numbers = [self._kv.num_owned_alone(sequence) + 1 for sequence in overtakers]
        if not guard.note_reserved(draft.step, has_enough=num_lacking <= sum(numbers)):
            return
        lacks_row = not self._table.has_free_row
        for sequence, number in zip(overtakers, numbers, strict=True):
            if num_lacking <= 0 and not lacks_row:
                return
            num_lacking -= number
            lacks_row = False
            sequence.num_preemptions += 1
            self._preempt(sequence, draft)

    def may_preempt(self, head: Sequence, preempting: list[Sequence]) -> bool:
        """Return whether a waiting sequence may take the row of another sequence."""
        if head.num_pending:
            return False
        if head is self.pending_preemptor:
            return True
        if self._table.swapped and _precedes(self._table.swapped[0], head):
            return False
        return self._choose_preempted(head, preempting) is not None

    def preempt_for(self, head: Sequence, preempting: list[Sequence], draft: PlanDraft) -> bool:
        """Preempt a sequence for a waiting sequence; return False if there is none."""
        victim = self._choose_preempted(head, preempting)
        if victim is None:
            return False
        # Sequences of other tenants are protected by the rows that their tenants keep.
        victim.num_preemptions += victim.share is head.share
        self.pending_preemptor = head
        self._preempt(victim, draft)
        return True

    def lacks_blocks(self, head: Sequence) -> bool:
        """Return whether a waiting sequence lacks blocks, and its tenant may have that many."""
        num_needed = self._kv.blocks_for(self._size.num_tokens_to_hold(head))
        num_tenants = len({sequence.share for sequence in self._table.running} | {head.share})
        if num_needed > self._kv.pool.num_blocks // num_tenants:
            return False
        return self._size.num_lacking(head) > 0

    def _choose_preempted(self, head: Sequence, preempting: list[Sequence]) -> Sequence | None:
        """Return the sequence whose row a waiting one may take, or None."""
        table = self._table
        if not table.running:
            return None
        num_own = head.share.num_rows
        # In O(1) if all rows are its own tenant's, which is the rule.
        if num_own == table.num_taken_rows and table.running[-1].priority <= head.priority:
            return None
        num_own += sum(sequence.share is head.share for sequence in preempting)
        return choose_preempted(table.running, head, num_own=num_own)

    def _preempt(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Take the row and blocks of a running sequence."""
        with Blame(sequence):
            self._swap_or_release(sequence, draft)

    def _swap_or_release(self, sequence: Sequence, draft: PlanDraft) -> None:
        if self._kv.can_swap_out(sequence) and self._is_to_swap(sequence):
            draft.swap_outs += self._kv.swap_out(sequence, draft.step)
            sequence.ready_step = draft.step
            self._table.preempt_sequence(sequence, SequenceState.SWAPPED)
            self.num_swap_preemptions += 1
        else:
            if sequence.has_sampled:
                # Verified blocks may stay cached in the CPU pool.
                self._kv.mark_verified(sequence)
            self._kv.release(sequence)
            sequence.forget_computed()
            self._table.preempt_sequence(sequence, SequenceState.WAITING)
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
            num_blocks=len(sequence.blocks.ids) - num_shared,
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

    __slots__ = ("_kv", "_table")

    def __init__(self, kv: KvManager, sequence_table: SequenceTable) -> None:
        self._kv = kv
        self._table = sequence_table

    def num_tokens_to_hold(self, sequence: Sequence) -> int:
        """Return the number of tokens that a sequence gets blocks for when it starts."""
        num_tokens = sequence.length
        if sequence.num_preemptions:
            # A sequence that lost its blocks more often runs longer before it needs another block.
            num_blocks = min(2**sequence.num_preemptions, _MAX_HEADROOM)
            num_tokens += num_blocks * self._kv.block_size
        # The last token is never computed.
        return max(min(num_tokens, sequence.max_length - 1), sequence.length)

    def num_spare_blocks(self, sequence: Sequence) -> int:
        """Return the blocks to leave free, so that a new sequence is not preempted at once."""
        num_rows = len(self._table.running) + len(self._table.arriving)
        is_passing = self._table.guard.starved not in (None, sequence)
        return num_rows * (_SPARE_BLOCKS if is_passing else 1)

    def num_lacking(self, sequence: Sequence) -> int:
        """Return how many blocks a sequence lacks beyond free blocks and blocks in transit."""
        return self._kv.num_lacking(
            sequence,
            num_tokens=self.num_tokens_to_hold(sequence),
            num_spare=self.num_spare_blocks(sequence),
        )


def choose_victim(running: SequenceQueue, needy: Sequence) -> Sequence | None:
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


def choose_preempted(running: SequenceQueue, head: Sequence, *, num_own: int) -> Sequence | None:
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
