"""Distributes the token budget, rows and blocks of a step.

Running sequences come first, then swapped sequences, then prompts, the prompts of the least served
tenant first. A running sequence takes blocks only from sequences behind it; without any it waits a
step. Hence the first running sequence always progresses, and eventually all do. `StarvationGuard`
decides which sequences may overtake a starved sequence, and `Preemptor` who loses a row for whom.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cluster.scheduling.fault_recovery import Blame
from cluster.scheduling.plan_draft import PlanDraft
from cluster.scheduling.preemptor import AdmissionSize, Preemptor
from cluster.scheduling.sequence import Sequence, SequenceState
from cluster.scheduling.sequence_table import MAX_SKIPPED

if TYPE_CHECKING:
    from cluster.scheduling.fair_queue import FairQueue, Share
    from cluster.scheduling.kv_manager import KvManager
    from cluster.scheduling.sequence_table import SequenceTable
    from cluster.scheduling.step_times import StepPace
    from cluster.scheduling.swap_costs import SwapCosts
    from pagedray.config import SchedulerConfig

__all__ = ["Planner"]

_MAX_FEW = 8
"""Waiting sequences of a tenant up to which its prompts end in short steps."""
_FORK_COST = 2**14
"""The fixed cost of a fork, in tokens of a prompt that it copies."""
_MAX_FORK_COST = 5 * 2**17
"""The cost after which a plan has no more forks, so that it takes less than a millisecond."""

_MAX_SKIPPED = 8
_MAX_SKIPPED_OF_TENANT = 4
"""More than 1, so that a large prompt does not stop its own tenant either."""


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
        draft = PlanDraft(step, budget=self._max_num_tokens)
        table = self._table
        preempting: list[Sequence] = []
        if table.guard.starved is not None:
            self._preemptor.reclaim(draft)
        if table.waiting:
            preempting = self._preempt_for_waiting(draft)
        prefills = self._plan_decodes(draft)
        # A token of the budget was set aside for each.
        draft.budget += len(preempting)
        if self._pace is not None:
            self._pace.begin_step(
                num_tokens=len(draft.decodes),
                num_pairs=sum(draft.decode_positions) + len(draft.decodes),
            )
        for num_left, sequence in zip(range(len(preempting))[::-1], preempting, strict=True):
            with Blame(sequence):
                self._start(sequence, draft, budget=draft.budget - num_left)
        if table.swapped and not draft.is_held:
            self._swap_in(draft, acknowledged_step)
        if prefills or table.waiting:
            self._plan_prompts(prefills, draft)
        self._register(draft)
        draft.evictions, draft.restores = self._kv.take_copies(step)
        if self._kv.disk is not None:
            draft.disk_reads = self._kv.disk.take_reads(step)
            if not draft.is_empty:
                draft.disk_writes = self._kv.disk.take_writes(step)
        return draft

    def _plan_decodes(self, draft: PlanDraft) -> list[Sequence]:
        """Plan the next token of each running sequence, and return sequences still in prefill."""
        prefills: list[Sequence] = []
        decodes, positions = draft.decodes, draft.decode_positions
        # With more sequences than tokens, the budget may end at any of them.
        is_tight = len(self._table.running) > draft.budget
        # Preemption removes sequences from the queue, but only behind the current sequence.
        for sequence in self._table.running:
            position = sequence.num_computed
            if is_tight or position >= sequence.unchecked_until:
                if sequence.is_prefill:
                    prefills.append(sequence)
                    continue
                if sequence.is_ending or sequence.lacks_mask:
                    continue
                if len(decodes) == draft.budget:
                    break
                with Blame(sequence):
                    can_decode = self._prepare_decode(sequence, draft)
                if not can_decode:
                    continue
            decodes.append(sequence)
            positions.append(position)
            sequence.num_computed = position + 1
        draft.budget -= len(decodes)
        return prefills

    def _prepare_decode(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Find out how long a sequence decodes unexamined; return False if it cannot decode now.

        It gets a block if needed.
        """
        if sequence.num_computed == sequence.blocks.num_slots:
            block = self._preemptor.make_room(sequence, draft)
            if block is None:
                return False
            draft.growing_rows.append(sequence.row)
            draft.new_block_ids.append(block)
        if sequence.masks is None or not sequence.masks.num_deferred:
            sequence.unchecked_until = min(sequence.blocks.num_slots, sequence.max_length - 1)
        return True

    def _plan_prompts(self, prefills: list[Sequence], draft: PlanDraft) -> None:
        """Compute prompts and start waiting sequences, of the least served tenant first."""
        if len(prefills) > 1:
            prefills.sort(key=lambda sequence: sequence.share.time)
        left = deque(prefills)
        skipped = SkippedSequences(self._table.waiting)
        while draft.budget and self._has_time:
            head = self._next_waiting(draft, skipped)
            if head is not None and not (left and _is_before(left[0], head)):
                with Blame(head):
                    has_started = self._start_if_room(head, draft)
                if not has_started:
                    skipped.skip(head)
            elif left:
                sequence = left.popleft()
                if budget := self._budget_for(sequence, draft):
                    with Blame(sequence):
                        self._plan_chunk(sequence, draft, budget=budget)
            else:
                break
        skipped.put_back()

    @property
    def _has_time(self) -> bool:
        """Whether the step may have more tokens of prompts."""
        return self._pace is None or self._pace.num_tokens(0) >= 1

    def _next_waiting(self, draft: PlanDraft, skipped: SkippedSequences) -> Sequence | None:
        """Return the next waiting sequence that might start, or None."""
        table = self._table
        if not table.waiting.has_first or draft.is_held or skipped.is_full:
            return None
        # Copies prolong a step, as tokens do.
        num_restored = self._kv.device.num_loads * self._kv.block_size
        if num_restored >= self._max_num_tokens:
            return None
        # Each needs a row, and one block at least.
        if not (table.has_free_row and self._kv.pool.num_free):
            return None
        if not table.guard.is_reserved:
            return table.waiting.first
        starved = table.guard.starved
        if starved is None or starved.state is not SequenceState.WAITING or skipped.are_any:
            return None
        return starved

    def _budget_for(self, sequence: Sequence, draft: PlanDraft) -> int:
        """Return how many tokens a prompt may take.

        A step that ends the prompt of a less served tenant is kept short: prompts of others take at
        most a quarter of the budget. If many sequences of that tenant wait, throughput counts
        instead.
        """
        first = draft.first_share
        if first is None or first is sequence.share or len(first.waiting) > _MAX_FEW:
            return draft.budget
        num_most = max(self._max_num_tokens // 4, 1)
        return min(draft.budget, max(num_most - draft.num_other_tokens, 0))

    def _start_if_room(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Start a waiting sequence, or return False if it must wait."""
        budget = self._budget_for(sequence, draft)
        if sequence.num_pending or not budget or self._awaits_disk(sequence, draft.step):
            return False
        is_full = draft.fork_cost + sequence.num_prompt_tokens > _MAX_FORK_COST
        if draft.fork_cost and is_full and self._donor_for(sequence, draft.step) is not None:
            return False
        if not self._admit(sequence, draft):
            self._table.guard.note_failure(sequence)
            return False
        self._start(sequence, draft, budget=budget)
        return True

    def _start(self, sequence: Sequence, draft: PlanDraft, *, budget: int) -> None:
        """Start a waiting sequence that has its blocks."""
        # Tokens computed before, or cached, cost the tenant nothing.
        sequence.num_charged = max(sequence.num_charged, sequence.num_computed)
        if sequence is self._preemptor.pending_preemptor:
            self._preemptor.pending_preemptor = None
        if sequence.blocks.awaits_copies:
            sequence.ready_step = draft.step
            self._table.start_sequence(sequence, SequenceState.ARRIVING)
            draft.add_start(sequence)
            return
        self._table.start_sequence(sequence, SequenceState.RUNNING)
        draft.add_start(sequence)
        self._plan_chunk(sequence, draft, budget=budget)

    def _plan_chunk(self, sequence: Sequence, draft: PlanDraft, *, budget: int) -> None:
        """Plan as many of a sequence's known tokens as `budget` allows."""
        share = sequence.share
        num_tokens = min(budget, sequence.prefill_end - sequence.num_computed)
        if self._pace is not None:
            # A sequence that has just started has at least a token.
            first_position = sequence.num_computed
            num_tokens = int(min(num_tokens, max(self._pace.num_tokens(first_position), 1)))
            self._pace.add_tokens(num_tokens, first_position=first_position)
        num_computed = sequence.num_computed + num_tokens
        draft.add_chunk(sequence, num_tokens, self._kv.extend(sequence, num_computed))
        sequence.num_computed = num_computed
        num_charged = min(num_computed, sequence.num_initial_tokens)
        if num_charged > sequence.num_charged:
            cost = (num_charged - sequence.num_charged) * sequence.active.token_cost
            self._table.waiting.charge(share, cost)
            sequence.num_charged = num_charged
        if draft.first_share not in (None, share):
            draft.num_other_tokens += num_tokens
        if num_computed == sequence.prefill_end:
            sequence.is_prefill = False
            sequence.num_prefilled = num_computed
            draft.first_share = draft.first_share or share
        if sequence.prompt_step is None and num_computed >= sequence.num_prompt_tokens:
            sequence.prompt_step = draft.step

    def _preempt_for_waiting(self, draft: PlanDraft) -> list[Sequence]:
        """Give blocks to waiting sequences that may take the rows of others, and return them.

        They are the first of the least served tenant. They start once the decodes are planned,
        which must not include sequences that lose their rows.
        """
        table, preempting = self._table, list[Sequence]()
        num_most = min(MAX_SKIPPED, draft.budget)
        while table.waiting and len(preempting) < num_most:
            head = table.waiting.first
            # A fork needs few free blocks, but too many would be preempted for it: `lacks_blocks`
            # also counts shared blocks.
            with Blame(head):
                if self._donor_for(head, draft.step) is not None:
                    break
                if self._awaits_disk(head, draft.step):
                    break
                if not self._preemptor.may_preempt(head, preempting):
                    break
                if not self._take_room(head, preempting, draft):
                    break
            table.waiting.remove(head)
            preempting.append(head)
        for sequence in preempting:
            table.waiting.insert(sequence)
        # A token of the budget is set aside for each.
        draft.budget -= len(preempting)
        return preempting

    def _take_room(self, head: Sequence, preempting: list[Sequence], draft: PlanDraft) -> bool:
        """Find a row and blocks for a waiting sequence, from others if needed.

        Returns False if it must wait.
        """
        preemptor = self._preemptor
        lacks_row = self._table.num_free_rows == len(preempting)
        if lacks_row and not preemptor.preempt_for(head, preempting, draft):
            return False
        while not self._admit(head, draft):
            if not (
                preemptor.lacks_blocks(head) and preemptor.preempt_for(head, preempting, draft)
            ):
                # Others must not take the blocks in transit.
                draft.is_held = (
                    head is preemptor.pending_preemptor and self._kv.pool.num_in_transit > 0
                )
                return False
        return True

    def _swap_in(self, draft: PlanDraft, acknowledged_step: int) -> None:
        """Swap sequences in while there is room; later sequences may overtake the first few."""
        num_skipped = 0
        guard = self._table.guard
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
                    draft.step,
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
            draft.swap_ins += copies
            sequence.ready_step = draft.step
            self._table.start_sequence(sequence, SequenceState.ARRIVING)
            draft.add_start(sequence)

    def _admit(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Give a waiting sequence its blocks, or return False if there is no room."""
        num_tokens = self._size.num_tokens_to_hold(sequence)
        num_spare = self._size.num_spare_blocks(sequence)
        donor = self._donor_for(sequence, draft.step)
        if donor is not None:
            copies = self._kv.fork(sequence, donor, num_tokens=num_tokens, num_spare=num_spare)
            if copies is None:
                return False
            draft.copies += copies
            draft.fork_cost += _FORK_COST + sequence.num_prompt_tokens
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

    def _register(self, draft: PlanDraft) -> None:
        """Register the blocks that the plan fills, for sequences of later plans."""
        # After all starts: a step cannot read blocks that it computes itself.
        for sequence in draft.prefilled:
            with Blame(sequence):
                self._kv.register_blocks(sequence)
                if sequence.prompt_step == draft.step:
                    self._table.release_siblings(sequence)


def _is_before(prefill: Sequence, head: Sequence) -> bool:
    """Return whether the rest of a prompt comes before a waiting sequence."""
    return head.share is prefill.share or head.share.time > prefill.share.time


class SkippedSequences:
    """Takes sequences from a fair queue, to find others behind them, and puts them back."""

    __slots__ = ("_counts", "_items", "_queue")

    def __init__(self, queue: FairQueue[Sequence]) -> None:
        self._queue = queue
        self._items: list[Sequence] = []
        self._counts: dict[Share[Sequence], int] = {}

    @property
    def are_any(self) -> bool:
        """Whether a sequence was passed and not yet put back."""
        return bool(self._items)

    @property
    def is_full(self) -> bool:
        """Whether no more may be passed, which bounds the time of a step."""
        return len(self._items) >= _MAX_SKIPPED

    def skip(self, sequence: Sequence) -> None:
        """Take a sequence from the queue; the fourth of a tenant hides all others of it."""
        self._items.append(sequence)
        count = self._counts[sequence.share] = self._counts.get(sequence.share, 0) + 1
        self._queue.remove(sequence)
        if count == _MAX_SKIPPED_OF_TENANT:
            self._queue.hide_share(sequence.share)

    def put_back(self) -> None:
        """Put all passed sequences back into the queue."""
        for sequence in self._items:
            self._queue.insert(sequence)
