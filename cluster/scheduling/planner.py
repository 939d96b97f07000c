"""Distributes the token budget, rows and blocks of a step.

Running sequences come first, then swapped sequences, then prompts, the prompts of the least served
tenant first. A running sequence takes blocks only from sequences behind it; without any it waits a
step. Hence the first running sequence always progresses, and eventually all do. `StarvationGuard`
decides which sequences may overtake a starved sequence, and `Preemptor` who loses a row for whom.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cluster.scheduling.fault_recovery import Blame, BlamedError
from cluster.scheduling.plan_draft import StepBudget
from cluster.scheduling.policy import (
    MAX_SKIPPED,
    AdmissionSize,
    Preemptor,
    SkippedSequences,
    is_before,
)
from cluster.scheduling.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from cluster.scheduling.costs import StepPace, SwapCosts
    from cluster.scheduling.kv_manager import KvManager
    from cluster.scheduling.plan_draft import PlanDraft
    from cluster.scheduling.sequence_table import SequenceTable
    from pagedray.config import SchedulerConfig

__all__ = ["Planner"]

_FORK_COST = 2**14
"""The fixed cost of a fork, in tokens of a prompt that it copies."""
_MAX_FORK_COST = 5 * 2**17
"""The cost after which a plan has no more forks, so that it takes less than a millisecond."""


class Planner:
    """Makes plans; it changes the rows and blocks of sequences but sees no tokens."""

    def __init__(
        self,
        kv: KvManager,
        sequence_table: SequenceTable,
        *,
        config: SchedulerConfig,
        swap_costs: SwapCosts,
        pace: StepPace | None,
    ) -> None:
        """Without a pace, steps may take any time."""
        self._kv = kv
        self._pace = pace
        self._table = sequence_table
        self._max_num_tokens = config.limits().max_num_batched_tokens
        self._size = AdmissionSize(kv, sequence_table)
        self._preemptor = Preemptor(
            kv, sequence_table, self._size, preemption=config.preemption, swap_costs=swap_costs
        )

    @property
    def num_swap_preemptions(self) -> int:
        """Sequences preempted by swapping their blocks, since the start."""
        return self._preemptor.num_swap_preemptions

    @property
    def num_recompute_preemptions(self) -> int:
        """Sequences preempted by dropping their blocks, since the start."""
        return self._preemptor.num_recompute_preemptions

    def draft_plan(self, step: int, *, acknowledged_step: int) -> PlanDraft:
        """Return the draft of `step`, which may be empty."""
        budget = StepBudget(step, num_tokens=self._max_num_tokens)
        draft = budget.draft
        table = self._table
        preempting: list[Sequence] = []
        if self._preemptor.guard.starved is not None:
            self._preemptor.reclaim(budget)
        if table.waiting:
            preempting = self._preempt_for_waiting(budget)
        prefills = self._plan_decodes(budget)
        # A token of the budget was set aside for each.
        budget.num_tokens += len(preempting)
        if self._pace is not None:
            self._pace.begin_step(
                num_tokens=len(draft.decodes),
                num_pairs=sum(draft.decode_positions) + len(draft.decodes),
            )
        for num_left, sequence in zip(range(len(preempting))[::-1], preempting, strict=True):
            with Blame(sequence):
                self._start(sequence, budget, num_tokens=budget.num_tokens - num_left)
        if table.swapped and not budget.is_held:
            self._swap_in(budget, acknowledged_step)
        if prefills or table.waiting:
            self._plan_prompts(prefills, budget)
        self._register(budget)
        draft.evictions, draft.restores = self._kv.take_copies(step)
        if self._kv.disk is not None:
            draft.disk_reads = self._kv.disk.take_reads(step)
            if not draft.is_empty:
                draft.disk_writes = self._kv.disk.take_writes(step)
        return draft

    def _plan_decodes(self, budget: StepBudget) -> list[Sequence]:
        """Plan the next token of each running sequence, and return sequences still in prefill."""
        prefills: list[Sequence] = []
        decodes, positions = budget.draft.decodes, budget.draft.decode_positions
        # With more sequences than tokens, the budget may end at any of them.
        is_tight = len(self._table.running) > budget.num_tokens
        # Preemption removes sequences from the queue, but only behind the current sequence.
        for sequence in self._table.running:
            position = sequence.num_computed
            if is_tight or position >= sequence.unchecked_until:
                if sequence.is_prefill:
                    prefills.append(sequence)
                    continue
                if sequence.is_ending or sequence.lacks_mask:
                    continue
                if len(decodes) == budget.num_tokens:
                    break
                # Unlike a `Blame` block, this costs nothing without an exception.
                try:
                    if not self._prepare_decode(sequence, budget):
                        continue
                except BlamedError:
                    raise
                except Exception as error:
                    raise BlamedError(sequence) from error
            decodes.append(sequence)
            positions.append(position)
            sequence.num_computed = position + 1
        budget.num_tokens -= len(decodes)
        return prefills

    def _prepare_decode(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Find out how long a sequence decodes unexamined; return False if it cannot decode now.

        It gets a block if needed.
        """
        if sequence.num_computed == sequence.blocks.num_slots:
            block = self._preemptor.make_room(sequence, budget)
            if block is None:
                return False
            budget.draft.growing_rows.append(sequence.row)
            budget.draft.new_block_ids.append(block)
        if sequence.masks is None or not sequence.masks.num_deferred:
            sequence.unchecked_until = min(sequence.blocks.num_slots, sequence.max_length - 1)
        return True

    def _plan_prompts(self, prefills: list[Sequence], budget: StepBudget) -> None:
        """Compute prompts and start waiting sequences, of the least served tenant first."""
        if len(prefills) > 1:
            prefills.sort(key=lambda sequence: sequence.share.time)
        left = deque(prefills)
        skipped = SkippedSequences(self._table.waiting)
        while budget.num_tokens and self._has_time:
            head = self._next_waiting(budget, skipped)
            if head is not None and not (left and is_before(left[0], head)):
                with Blame(head):
                    has_started = self._start_if_room(head, budget)
                if not has_started:
                    skipped.skip(head)
            elif left:
                sequence = left.popleft()
                if num_tokens := budget.num_tokens_for(sequence):
                    with Blame(sequence):
                        self._plan_chunk(sequence, budget, num_tokens=num_tokens)
            else:
                break
        skipped.put_back()

    @property
    def _has_time(self) -> bool:
        """Whether the step may have more tokens of prompts."""
        return self._pace is None or self._pace.num_tokens(0) >= 1

    def _next_waiting(self, budget: StepBudget, skipped: SkippedSequences) -> Sequence | None:
        """Return the next waiting sequence that might start, or None."""
        table = self._table
        if not table.waiting.has_first or budget.is_held or skipped.is_full:
            return None
        # Copies prolong a step, as tokens do.
        num_restored = self._kv.device.num_loads * self._kv.block_size
        if num_restored >= self._max_num_tokens:
            return None
        # Each needs a row, and one block at least.
        if not (table.has_free_row and self._kv.pool.num_free):
            return None
        if not self._preemptor.guard.is_reserved:
            return table.waiting.first
        starved = self._preemptor.guard.starved
        if starved is None or starved.state is not SequenceState.WAITING or skipped.are_any:
            return None
        return starved

    def _start_if_room(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Start a waiting sequence, or return False if it must wait."""
        num_tokens = budget.num_tokens_for(sequence)
        if sequence.num_pending or not num_tokens or self._awaits_disk(sequence, budget.step):
            return False
        is_full = budget.fork_cost + sequence.num_prompt_tokens > _MAX_FORK_COST
        if budget.fork_cost and is_full and self._donor_for(sequence, budget.step) is not None:
            return False
        if not self._admit(sequence, budget):
            self._preemptor.guard.note_failure(sequence)
            return False
        self._start(sequence, budget, num_tokens=num_tokens)
        return True

    def _start(self, sequence: Sequence, budget: StepBudget, *, num_tokens: int) -> None:
        """Start a waiting sequence that has its blocks."""
        # Tokens computed before, or cached, cost the tenant nothing.
        sequence.num_charged = max(sequence.num_charged, sequence.num_computed)
        self._preemptor.note_start(sequence)
        if sequence.blocks.awaits_copies:
            sequence.ready_step = budget.step
            self._table.start_sequence(sequence, SequenceState.ARRIVING)
            budget.draft.add_start(sequence)
            return
        self._table.start_sequence(sequence, SequenceState.RUNNING)
        budget.draft.add_start(sequence)
        self._plan_chunk(sequence, budget, num_tokens=num_tokens)

    def _plan_chunk(self, sequence: Sequence, budget: StepBudget, *, num_tokens: int) -> None:
        """Plan a sequence's next known tokens, at most `num_tokens`."""
        share = sequence.share
        num_tokens = min(num_tokens, sequence.prefill_end - sequence.num_computed)
        if self._pace is not None:
            # A sequence that has just started has at least a token.
            first_position = sequence.num_computed
            num_tokens = int(min(num_tokens, max(self._pace.num_tokens(first_position), 1)))
            self._pace.add_tokens(num_tokens, first_position=first_position)
        num_computed = sequence.num_computed + num_tokens
        budget.draft.add_chunk(sequence, num_tokens, self._kv.extend(sequence, num_computed))
        budget.num_tokens -= num_tokens
        sequence.num_computed = num_computed
        num_charged = min(num_computed, sequence.num_initial_tokens)
        if num_charged > sequence.num_charged:
            cost = (num_charged - sequence.num_charged) * sequence.active.token_cost
            self._table.waiting.charge(share, cost)
            sequence.num_charged = num_charged
        if budget.first_share not in (None, share):
            budget.num_other_tokens += num_tokens
        if num_computed == sequence.prefill_end:
            sequence.is_prefill = False
            budget.first_share = budget.first_share or share
        if sequence.prompt_step is None and num_computed >= sequence.num_prompt_tokens:
            sequence.prompt_step = budget.step

    def _preempt_for_waiting(self, budget: StepBudget) -> list[Sequence]:
        """Give blocks to waiting sequences that may take the rows of others, and return them.

        They are the first of the least served tenant. They start once the decodes are planned,
        which must not include sequences that lose their rows.
        """
        table, preempting = self._table, list[Sequence]()
        num_most = min(MAX_SKIPPED, budget.num_tokens)
        while table.waiting and len(preempting) < num_most:
            head = table.waiting.first
            # A fork needs few free blocks, but too many would be preempted for it: `lacks_blocks`
            # also counts shared blocks.
            with Blame(head):
                if self._donor_for(head, budget.step) is not None:
                    break
                if self._awaits_disk(head, budget.step):
                    break
                if not self._preemptor.may_preempt(head, preempting):
                    break
                if not self._take_room(head, preempting, budget):
                    break
            table.waiting.remove(head)
            preempting.append(head)
        for sequence in preempting:
            table.waiting.insert(sequence)
        # A token of the budget is set aside for each.
        budget.num_tokens -= len(preempting)
        return preempting

    def _take_room(self, head: Sequence, preempting: list[Sequence], budget: StepBudget) -> bool:
        """Find a row and blocks for a waiting sequence, from others if needed.

        Returns False if it must wait.
        """
        preemptor = self._preemptor
        lacks_row = self._table.num_free_rows == len(preempting)
        if lacks_row and not preemptor.preempt_for(head, preempting, budget):
            return False
        while not self._admit(head, budget):
            if not (
                preemptor.lacks_blocks(head) and preemptor.preempt_for(head, preempting, budget)
            ):
                # Others must not take the blocks in transit.
                budget.is_held = (
                    head is preemptor.pending_preemptor and self._kv.pool.num_in_transit > 0
                )
                return False
        return True

    def _swap_in(self, budget: StepBudget, acknowledged_step: int) -> None:
        """Swap sequences in while there is room; later sequences may overtake the first few."""
        num_skipped = 0
        guard = self._preemptor.guard
        for sequence in [*self._table.swapped]:
            if guard.is_reserved and sequence is not guard.starved:
                continue
            if num_skipped == MAX_SKIPPED or not self._table.has_free_row:
                return
            if sequence.ready_step > acknowledged_step or sequence.num_pending:
                num_skipped += 1
                continue
            with Blame(sequence):
                copies = self._kv.swap_in(
                    sequence,
                    budget.step,
                    num_tokens=self._size.num_tokens_to_hold(sequence),
                    num_spare=self._size.num_spare_blocks(sequence),
                )
            if copies is None:
                num_skipped += 1
                if sequence.blocks.cpu_ids:
                    guard.note_failure(sequence)
                else:
                    self._table.recompute_swapped(sequence)
                continue
            budget.draft.swap_ins += copies
            sequence.ready_step = budget.step
            self._preemptor.note_start(sequence)
            self._table.start_sequence(sequence, SequenceState.ARRIVING)
            budget.draft.add_start(sequence)

    def _admit(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Give a waiting sequence its blocks, or return False if there is no room."""
        num_tokens = self._size.num_tokens_to_hold(sequence)
        num_spare = self._size.num_spare_blocks(sequence)
        donor = self._donor_for(sequence, budget.step)
        if donor is not None:
            copies = self._kv.fork(sequence, donor, num_tokens=num_tokens, num_spare=num_spare)
            if copies is None:
                return False
            budget.draft.copies += copies
            budget.fork_cost += _FORK_COST + sequence.num_prompt_tokens
            sequence.donor_row = donor.row
            return True
        if not self._kv.admit(sequence, num_tokens=num_tokens, num_spare=num_spare):
            return False
        if sequence.active.is_queued:
            num_cached = min(sequence.num_computed, sequence.num_prompt_tokens)
            sequence.active.num_cached_tokens = num_cached
        return True

    def _awaits_disk(self, sequence: Sequence, step: int) -> bool:
        """Return whether a waiting sequence waits for blocks that are read from the disk."""
        if self._kv.disk is None or self._donor_for(sequence, step) is not None:
            return False
        return self._kv.awaits_disk(sequence, step)

    def _donor_for(self, sequence: Sequence, step: int) -> Sequence | None:
        """Return a sibling with its prompt in device blocks since an earlier step, or None."""
        if sequence.index == 0 or len(sequence.token_ids) > sequence.num_prompt_tokens:
            return None
        for sibling in sequence.active.sequences:
            prompt_step = sibling.prompt_step
            is_running = sibling.state is SequenceState.RUNNING
            if is_running and prompt_step is not None and prompt_step < step:
                return sibling
        return None

    def _register(self, budget: StepBudget) -> None:
        """Register the blocks that the plan fills, for sequences of later plans."""
        # After all starts: a step cannot read blocks that it computes itself.
        for sequence in budget.draft.prefilled:
            with Blame(sequence):
                self._kv.register_blocks(sequence)
                if sequence.prompt_step == budget.step:
                    self._table.release_siblings(sequence)
