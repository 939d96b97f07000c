"""Distributes the token budget, rows and blocks of a step.

Running sequences come first, then swapped ones, then waiting ones. Blocks are only taken from
sequences behind the one that needs them; it waits a step if there are none. Hence the first
running sequence always progresses, and eventually all do.
"""

from cluster.scheduling.kv_manager import KvManager
from cluster.scheduling.plan_draft import PlanDraft
from cluster.scheduling.policy import choose_victim, is_spared
from cluster.scheduling.sequence import Sequence, SequenceState
from cluster.scheduling.sequence_table import SequenceTable
from cluster.scheduling.swap_costs import SwapCosts
from pagedray.batch import SequencePlan
from pagedray.config import SchedulerConfig

__all__ = ["Planner"]


class Planner:
    """Makes plans; it changes the rows and blocks of sequences but sees no tokens."""

    def __init__(
        self,
        kv: KvManager,
        sequence_table: SequenceTable,
        *,
        config: SchedulerConfig,
        swap_costs: SwapCosts,
    ) -> None:
        self._kv = kv
        self._table = sequence_table
        self._config = config
        self._swap_costs = swap_costs
        self.num_swap_preemptions = 0
        self.num_recompute_preemptions = 0

    def draft_plan(self, step: int, *, acknowledged_step: int) -> PlanDraft:
        """Return the draft of `step`, which may be empty."""
        draft = PlanDraft(step, budget=self._config.max_num_batched_tokens)
        for sequence in self._plan_decodes(draft):
            if draft.budget:
                self._plan_chunk(sequence, draft)
        if self._bring_back(draft, acknowledged_step):
            self._start_waiting(draft)
        self._register(draft)
        return draft

    def _plan_decodes(self, draft: PlanDraft) -> list[Sequence]:
        """Plan the next token of each running sequence, and return those still in prefill."""
        prefills: list[Sequence] = []
        singles, samples = draft.singles, draft.single_samples
        budget = draft.budget
        # Preemption removes sequences from the queue, but only behind the current one.
        for sequence in self._table.running:
            if sequence.is_prefill:
                prefills.append(sequence)
                continue
            length = sequence.length
            if length == sequence.max_length:
                continue
            if sequence.num_deferred and not sequence.has_mask:
                continue
            if not budget:
                break
            position = sequence.num_computed
            if position < sequence.num_slots:
                plan = SequencePlan(sequence.row, position, 1, True)
            else:
                block = self._make_room(sequence, draft)
                if block is None:
                    continue
                plan = SequencePlan(sequence.row, position, 1, True, [block])
            budget -= 1
            singles.append(plan)
            samples.append(sequence)
            sequence.num_computed = position + 1
            sequence.length = length + 1
        draft.budget = budget
        return prefills

    def _plan_chunk(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Plan as many of a sequence's known tokens as the budget allows."""
        num_tokens = min(draft.budget, sequence.length - sequence.num_computed)
        num_computed = sequence.num_computed + num_tokens
        draft.add_chunk(sequence, num_tokens, self._kv.extend(sequence, num_computed))
        sequence.num_computed = num_computed
        if num_computed == sequence.length:
            sequence.is_prefill = False
            sequence.length += 1
        if sequence.prompt_step is None and num_computed >= sequence.num_prompt_tokens:
            sequence.prompt_step = draft.step

    def _make_room(self, sequence: Sequence, draft: PlanDraft) -> int | None:
        """Add a block to a running sequence and return it, or None if it waits a step."""
        while (block := self._kv.append(sequence)) is None:
            # Blocks being swapped out may suffice for the stalled sequences and this one.
            if self._kv.pool.num_in_transit > draft.num_stalled:
                break
            victim = choose_victim(self._table.running, sequence)
            if victim is None:
                break
            self._preempt(victim, draft)
        else:
            return block
        draft.num_stalled += 1
        return None

    def _preempt(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Take the row and blocks of a running sequence."""
        sequence.num_preemptions += 1
        if self._kv.can_swap_out(sequence) and self._is_to_swap(sequence):
            draft.swap_outs += self._kv.swap_out(sequence, draft.step)
            sequence.ready_step = draft.step
            self._table.preempt_sequence(sequence, SequenceState.SWAPPED)
            self.num_swap_preemptions += 1
        else:
            self._kv.release(sequence)
            sequence.forget_computed()
            self._table.preempt_sequence(sequence, SequenceState.WAITING)
            self.num_recompute_preemptions += 1

    def _is_to_swap(self, sequence: Sequence) -> bool:
        """Return whether to swap a sequence out, given room in the CPU pool."""
        if self._config.preemption != "auto":
            return self._config.preemption == "swap"
        return self._swap_costs.choose_swap(
            num_blocks=len(sequence.block_ids), num_tokens=sequence.num_computed
        )

    def _bring_back(self, draft: PlanDraft, acknowledged_step: int) -> bool:
        """Swap sequences in while there is room, and return whether none is left."""
        swapped = self._table.swapped
        while swapped and self._table.has_free_row:
            sequence = swapped[0]
            if sequence.ready_step > acknowledged_step or sequence.num_pending:
                break
            copies = self._kv.swap_in(
                sequence,
                draft.step,
                num_tokens=self._num_tokens_to_hold(sequence),
                num_spare=self._num_spare_blocks(),
            )
            if copies is None:
                break
            draft.swap_ins += copies
            sequence.ready_step = draft.step
            self._table.start_sequence(sequence, SequenceState.ARRIVING)
            draft.add_start(sequence)
        return not swapped

    def _start_waiting(self, draft: PlanDraft) -> None:
        """Start waiting sequences while there are budget, rows and blocks."""
        waiting = self._table.waiting
        while waiting and draft.budget and self._table.has_free_row:
            sequence = waiting.first
            if sequence.num_pending or not self._admit(sequence, draft):
                return
            if not sequence.is_charged:
                # Its tenant does not pay for recomputation after preemption or a death of ranks.
                sequence.is_charged = True
                num_tokens = sequence.length - sequence.num_computed
                waiting.charge(sequence.share, num_tokens * sequence.active.token_cost)
            self._table.start_sequence(sequence, SequenceState.RUNNING)
            draft.add_start(sequence)
            self._plan_chunk(sequence, draft)

    def _admit(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Give a waiting sequence its blocks, or return False if there is no room."""
        num_tokens = self._num_tokens_to_hold(sequence)
        num_spare = self._num_spare_blocks()
        donor = self._donor_for(sequence, draft.step)
        if donor is not None:
            copies = self._kv.fork(sequence, donor, num_tokens=num_tokens, num_spare=num_spare)
            draft.copies += copies or ()
            return copies is not None
        if not self._kv.admit(sequence, num_tokens=num_tokens, num_spare=num_spare):
            return False
        if sequence.active.is_queued:
            num_cached = min(sequence.num_computed, sequence.num_prompt_tokens)
            sequence.active.num_cached_tokens = num_cached
        return True

    def _donor_for(self, sequence: Sequence, step: int) -> Sequence | None:
        """Return a sibling whose prompt is in device blocks since an earlier step, or None."""
        if sequence.index == 0 or len(sequence.token_ids) > sequence.num_prompt_tokens:
            return None
        for sibling in sequence.active.sequences:
            prompt_step = sibling.prompt_step
            is_running = sibling.state is SequenceState.RUNNING
            if is_running and prompt_step is not None and prompt_step < step:
                return sibling
        return None

    def _num_tokens_to_hold(self, sequence: Sequence) -> int:
        """Return the number of tokens that a sequence gets blocks for when it starts."""
        # The last token is never computed.
        return sequence.max_length - 1 if is_spared(sequence) else sequence.length

    def _num_spare_blocks(self) -> int:
        """Return the blocks to leave free, so that a new sequence is not preempted at once."""
        return len(self._table.running) + len(self._table.arriving)

    def _register(self, draft: PlanDraft) -> None:
        """Register the blocks that the plan fills, for sequences of later plans."""
        # After all starts: a step cannot read blocks that it computes itself.
        for sequence in draft.prefilled:
            self._kv.register(sequence)
            if sequence.prompt_step == draft.step:
                self._table.release_siblings(sequence)
