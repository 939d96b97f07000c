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
from cluster.scheduling.kv_manager import Admitted, Refusal
from cluster.scheduling.plan_builder import PlanBuilder, StepBudget
from cluster.scheduling.policy import (
    MAX_SKIPPED,
    AdmissionSize,
    Preemptor,
    SkippedSequences,
    is_before,
)
from cluster.scheduling.sequence import Sequence, Swapped, Waiting

if TYPE_CHECKING:
    from cluster.scheduling.costs import StepPace, SwapCosts
    from cluster.scheduling.kv_manager import KvManager
    from cluster.scheduling.output_reader import InFlightStep
    from cluster.scheduling.sequence_table import SequenceTable
    from cluster.scheduling.speculation import Chain, Speculator
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
        max_model_len: int,
        pace: StepPace | None,
        speculator: Speculator | None,
    ) -> None:
        """Without a pace, steps may take any time."""
        self._max_model_len = max_model_len
        self._speculator = speculator
        self._kv = kv
        self._states = kv.states
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

    def plan_step(self, step: int, *, acknowledged_step: int, may_speculate: bool) -> PlanBuilder:
        """Return the plan of `step`, which may be empty.

        `may_speculate` is true if all tokens sampled so far are known.
        """
        grid = 0 if self._states is None else self._states.grid
        budget = StepBudget(step, num_tokens=self._max_num_tokens, grid=grid)
        plan = budget.plan
        table = self._table
        self._preemptor.begin_step(step)
        preempting = self._preempt_for_waiting(budget) if table.waiting else {}
        prefills = self._plan_decodes(budget)
        # A token of the budget was set aside for each.
        budget.num_tokens += len(preempting)
        if self._pace is not None:
            self._pace.begin_step(
                num_tokens=len(plan.decodes),
                num_pairs=sum(plan.decode_positions) + len(plan.decodes),
            )
        for num_started, (sequence, admission) in enumerate(preempting.items(), 1):
            num_left = len(preempting) - num_started
            with Blame(sequence):
                self._start(sequence, admission, budget, num_tokens=budget.num_tokens - num_left)
        if table.swapped and not budget.is_held:
            self._swap_in(budget, acknowledged_step)
        if prefills or table.waiting:
            self._plan_prompts(prefills, budget)
        # Recurrent layers compute either prompts or chains.
        has_room = self._states is None or not plan.prefilled
        if self._speculator is not None and may_speculate and plan.decodes and has_room:
            room = self._room_for_drafts(budget)
            self._plan_chains(
                self._speculator.buy_drafts(plan.decodes, num_rows=plan.num_sequences, room=room),
                budget,
            )
        if self._speculator is not None and self._speculator.has_head:
            self._plan_head_drafts(self._speculator, plan)
        if plan.prefilled:
            self._register(budget)
        if self._states is not None:
            for save in self._states.saves:
                with Blame(save.sequence):
                    self._states.make_snapshot(save)
            copies, plan.saves, plan.late_copies = self._states.end_plan()
            plan.copies += copies
        plan.swap_outs = self._preemptor.swap_outs
        plan.evictions, plan.restores = self._kv.take_copies(step)
        if self._kv.disk is not None:
            plan.disk_reads = self._kv.disk.take_reads(step)
            if not plan.is_empty:
                plan.disk_writes = self._kv.disk.take_writes(step)
        return plan

    def _plan_decodes(self, budget: StepBudget) -> list[Sequence]:
        """Plan the next token of each running sequence, and return sequences still in prefill."""
        prefills: list[Sequence] = []
        decodes, positions = budget.plan.decodes, budget.plan.decode_positions
        # With more sequences than tokens, the budget may end at any of them.
        is_tight = len(self._table.running) > budget.num_tokens
        has_windows = self._kv.groups.has_windows
        # Preemption removes sequences from the queue, but only behind the current sequence.
        for sequence in self._table.running:
            position = sequence.num_computed
            if is_tight or position >= sequence.unchecked_until:
                if sequence.is_prefill:
                    if not has_windows or self._has_room(sequence):
                        prefills.append(sequence)
                    continue
                is_ending = position == sequence.max_length - 1
                if is_ending or (sequence.masks is not None and sequence.lacks_mask):
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

    def _has_room(self, sequence: Sequence) -> bool:
        """Return whether a sequence has blocks for its next known token."""
        if sequence.num_computed < sequence.blocks.num_slots:
            return True
        with Blame(sequence):
            return self._preemptor.make_room(sequence, self._kv.reserve_entry) is not None

    def _prepare_decode(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Find out how long a sequence decodes unexamined; return False if it cannot decode now.

        It gets a block if needed.
        """
        if sequence.num_computed == sequence.blocks.num_slots:
            added = self._preemptor.make_room(sequence, self._kv.append)
            if added is None:
                return False
            budget.plan.growing_rows.append(sequence.state.row)
            budget.plan.new_block_ids += added
        if sequence.masks is None or not sequence.masks.num_deferred:
            last_position, num_slots = sequence.max_length - 1, sequence.blocks.num_slots
            sequence.unchecked_until = num_slots if num_slots < last_position else last_position
        if self._states is not None:
            self._states.begin_decode(sequence)
        return True

    def continue_plan(self, step: int, last: InFlightStep) -> PlanBuilder:
        """Return an overlapped plan that continues the only plan in flight.

        It has the sequences of that plan, at positions as if all of their drafts are right, and
        drafts behind these. A sequence sits out that will probably have ended, or that lacks a
        block. The plan is empty if anything else could run, or if it is better to wait for tokens.
        """
        budget = StepBudget(step, num_tokens=self._max_num_tokens, grid=0)
        plan, speculator = budget.plan, self._speculator
        if speculator is None or not self.may_continue(speculator, last):
            return plan
        # Behind single decodes, positions are known.
        plan.is_overlapped = speculator.has_head or bool(last.chains)
        last_position, limits = self._max_model_len - 2, dict[Sequence, int]()
        for sequence in self._table.running:
            most = min(speculator.most_drafts(last.plan), last_position - sequence.num_computed)
            limit = speculator.most_guesses(sequence, most)
            if limit >= 0:
                limits[sequence] = limit
        if not limits:
            return plan
        if self._pace is not None:
            num_pairs = sum(sequence.num_computed + 1 for sequence in limits)
            self._pace.begin_step(num_tokens=len(limits), num_pairs=num_pairs)
        room = self._room_for_drafts(budget, num_sequences=len(limits))
        chains = speculator.chains_behind(last.chains, limits, room=room)
        if chains is None:
            return plan
        for sequence in limits:
            position = sequence.num_computed
            with Blame(sequence):
                self._hold_slots(sequence, position, position + 1, plan)
            if position < sequence.blocks.num_slots:
                plan.decodes.append(sequence)
                plan.decode_positions.append(position)
                sequence.num_computed = position + 1
        held = {*plan.decodes}
        self._plan_chains([chain for chain in chains if chain.sequence in held], budget)
        if speculator.has_head:
            self._plan_head_drafts(speculator, plan)
        plan.evictions, _ = self._kv.take_copies(step)
        return plan

    def may_continue(self, speculator: Speculator, last: InFlightStep) -> bool:
        """Return whether all sequences that could run are in a plan, and may be in the next plan.

        Tokens that are sampled under masks, or enter recurrent states, must be known.
        """
        table = self._table
        is_waiting = bool(table.waiting or table.swapped or table.arriving)
        if self._states is not None or is_waiting or last.plan.chunks or last.masked:
            return False
        sampled, num_tokens = {*last.sampled_sequences}, speculator.most_drafts(last.plan) + 1
        return all(
            sequence in sampled
            and not sequence.is_prefill
            and not (speculator.has_head and sequence.active.request.prediction)
            and not sequence.may_be_masked(num_tokens=num_tokens)
            for sequence in table.running
        )

    def _room_for_drafts(self, budget: StepBudget, *, num_sequences: int = 0) -> int:
        """Return how many drafts the step may have, with the tokens and rows that are left.

        `num_sequences` have a token in the step that is not planned yet.
        """
        num_rows = budget.plan.num_sequences + num_sequences
        room = min(budget.num_tokens - num_sequences, self._table.num_rows - num_rows)
        if self._pace is not None:
            room = min(room, int(self._pace.num_tokens(0)))
        return room

    def _plan_chains(self, chains: list[Chain], budget: StepBudget) -> None:
        """Give decodes drafts, as far as they have blocks."""
        plan = budget.plan
        for chain in chains:
            with Blame(chain.sequence):
                num_drafts = self._hold_chain(chain, budget)
            if num_drafts:
                plan.chains.append(chain._replace(draft_ids=chain.draft_ids[:num_drafts]))
                chain.sequence.num_computed += num_drafts
        if plan.chains:
            chained = {chain.sequence for chain in plan.chains}
            plan.decodes = [one for one in plan.decodes if one not in chained]
            plan.decode_positions = [one.num_computed - 1 for one in plan.decodes]

    def _hold_chain(self, chain: Chain, budget: StepBudget) -> int:
        """Give a chain blocks that nothing else needs; return how many drafts have room."""
        sequence = chain.sequence
        end = chain.position + 1 + len(chain.draft_ids)
        if self._states is not None:
            end = min(end, self._states.next_snapshot(chain.position))
        self._hold_slots(sequence, chain.position, end, budget.plan)
        sequence.num_computed = chain.position + 1
        return min(end, sequence.blocks.num_slots) - sequence.num_computed

    def _hold_slots(self, sequence: Sequence, first: int, end: int, plan: PlanBuilder) -> None:
        """Give a sequence blocks for its tokens up to `end`, as far as nothing else needs them.

        The step computes its tokens from `first` on, or from an earlier position if drafts of the
        plan in flight are wrong.
        """
        # The first token sees all blocks of its window.
        num_computed = sequence.num_computed
        sequence.num_computed = min(first, len(sequence.token_ids))
        while sequence.blocks.num_slots < end and self._has_spare_blocks:
            added = self._kv.append(sequence)
            if added is None:
                break
            plan.growing_rows.append(sequence.state.row)
            plan.new_block_ids += added
        sequence.num_computed = num_computed

    def _plan_head_drafts(self, speculator: Speculator, plan: PlanBuilder) -> None:
        """Have a draft head guess the tokens behind the sampled tokens, in blocks of their own."""
        is_fed, plan.num_drafts = speculator.plan_head(
            plan.sampled + [chain.sequence for chain in plan.chains],
            plan.prefilled,
            num_running=len(self._table.running),
            room=min(self._max_num_tokens, self._table.num_rows),
        )
        # An overlapped plan that follows reads the lengths of sequences from the head.
        plan.feeds_head = is_fed or plan.is_overlapped or bool(plan.chains)
        if not plan.num_drafts:
            return
        starts = [(chain.sequence, chain.position) for chain in plan.chains]
        starts += zip(plan.decodes, plan.decode_positions, strict=True)
        for chunks, sampled in (
            (plan.chunks, plan.chunk_samples),
            (plan.singles, plan.single_samples),
        ):
            firsts = [chunk.first_position for chunk in chunks if chunk.is_sampled]
            starts += zip(sampled, firsts, strict=True)
        for sequence, first in starts:
            # A draft model reads the sampled token, and all drafts but the last.
            end = min(sequence.num_computed + plan.num_drafts, sequence.max_length - 1)
            with Blame(sequence):
                self._hold_slots(sequence, first, end, plan)

    @property
    def _has_spare_blocks(self) -> bool:
        """Whether drafts may take blocks: each running sequence can have another block."""
        num_needed = len(self._table.running) * self._kv.groups.num_groups
        is_reserved = self._preemptor.guard.is_reserved
        return not is_reserved and self._kv.pool.num_free > num_needed

    def _plan_prompts(self, prefills: list[Sequence], budget: StepBudget) -> None:
        """Compute prompts and start waiting sequences, of the least served tenant first."""
        if len(prefills) > 1:
            prefills.sort(key=lambda sequence: sequence.share.time)
        left = deque(prefills)
        skipped = SkippedSequences(self._table.waiting)
        while budget.num_tokens and self._has_time:
            head = self._next_waiting(budget, skipped)
            if head is not None and not (left and is_before(left[0], head)):
                if budget.is_spent_for(head):
                    break
                with Blame(head):
                    has_started = self._start_if_room(head, budget)
                if not has_started:
                    skipped.skip(head)
            elif left:
                sequence = left.popleft()
                if budget.is_spent_for(sequence):
                    break
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
        # Each needs a row, and a block at least.
        if not (table.has_free_row and self._kv.pool.num_free):
            return None
        if not self._preemptor.guard.is_reserved:
            return table.waiting.first
        starved = self._preemptor.guard.starved
        if starved is None or not isinstance(starved.state, Waiting) or skipped.are_any:
            return None
        return starved

    def _start_if_room(self, sequence: Sequence, budget: StepBudget) -> bool:
        """Start a waiting sequence, or return False if it must wait."""
        num_tokens = budget.num_tokens_for(sequence)
        if not num_tokens:
            return False
        admission = self._admit(sequence, budget, may_wait=True)
        if isinstance(admission, Refusal):
            if admission is Refusal.NO_ROOM:
                self._preemptor.guard.note_failure(sequence)
            return False
        self._start(sequence, admission, budget, num_tokens=num_tokens)
        return True

    def _admit(
        self, sequence: Sequence, budget: StepBudget, *, may_wait: bool = False
    ) -> Admitted | Refusal:
        """Give a waiting sequence its blocks, or return why it must wait."""
        num_tokens, num_spare = self._size.measure(sequence)
        if sequence.num_pending:
            return Refusal.IS_SAMPLED
        if sequence.awaits_mask:
            budget.plan.deferred.append(sequence)
            return Refusal.AWAITS_MASK
        donor = self._kv.find_donor(sequence, budget.step)
        if donor is None:
            return self._kv.admit(
                sequence,
                budget.step,
                num_tokens=num_tokens,
                num_spare=num_spare,
                may_wait=may_wait,
            )
        if budget.fork_cost and budget.fork_cost + sequence.num_prompt_tokens > _MAX_FORK_COST:
            return Refusal.TOO_MANY_FORKS
        admission = self._kv.fork(sequence, donor, num_tokens=num_tokens, num_spare=num_spare)
        if isinstance(admission, Admitted):
            budget.fork_cost += _FORK_COST + sequence.num_prompt_tokens
        return admission

    def _start(
        self, sequence: Sequence, admission: Admitted, budget: StepBudget, *, num_tokens: int
    ) -> None:
        """Start a waiting sequence that has its blocks."""
        # Tokens computed before, or cached, cost the tenant nothing.
        sequence.num_charged = max(sequence.num_charged, sequence.num_computed)
        active = sequence.active
        if active.is_queued:
            active.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        copies_step = budget.step if admission.awaits_copies else None
        self._table.start_sequence(sequence, copies_step=copies_step)
        if sequence.is_deferred:
            budget.plan.deferred.append(sequence)
        budget.plan.copies += admission.copies
        budget.plan.add_start(sequence, admission.donor, kv=self._kv)
        if not admission.awaits_copies:
            self._plan_chunk(sequence, budget, num_tokens=num_tokens)

    def _plan_chunk(self, sequence: Sequence, budget: StepBudget, *, num_tokens: int) -> None:
        """Plan a sequence's next known tokens, at most `num_tokens`."""
        share = sequence.share
        num_tokens = min(num_tokens, sequence.prefill_end - sequence.num_computed)
        first_position = sequence.num_computed
        if self._pace is not None:
            # A sequence that has just started has at least a token.
            num_tokens = int(min(num_tokens, max(self._pace.num_tokens(first_position), 1)))
        if self._states is not None:
            num_tokens = self._states.begin_chunk(sequence, num_tokens)
        num_tokens = self._kv.reserve_chunk(sequence, num_tokens)
        if self._pace is not None:
            self._pace.add_tokens(num_tokens, first_position=first_position)
        num_computed = first_position + num_tokens
        budget.plan.add_chunk(sequence, num_tokens, kv=self._kv)
        budget.num_tokens -= num_tokens
        sequence.num_computed = num_computed
        if self._states is not None:
            self._states.end_chunk(sequence)
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

    def _preempt_for_waiting(self, budget: StepBudget) -> dict[Sequence, Admitted]:
        """Give blocks to waiting sequences that may take the rows of others, and return them.

        They are the first of the least served tenant. They start once the decodes are planned,
        which must not include sequences that lose their rows.
        """
        table, preempting = self._table, dict[Sequence, Admitted]()
        num_most = min(MAX_SKIPPED, budget.num_tokens)
        while table.waiting and len(preempting) < num_most:
            head = table.waiting.first
            # A fork needs few free blocks, but too many would be preempted for it: `lacks_blocks`
            # also counts shared blocks.
            with Blame(head):
                if self._kv.find_donor(head, budget.step) is not None:
                    break
                if self._kv.prefixes.awaits_disk(head, budget.step):
                    break
                if not self._preemptor.may_preempt(head, preempting):
                    break
                admission = self._take_room(head, preempting, budget)
                if admission is None:
                    break
            table.waiting.remove(head)
            preempting[head] = admission
        for sequence in preempting:
            table.waiting.insert(sequence)
        # A token of the budget is set aside for each.
        budget.num_tokens -= len(preempting)
        return preempting

    def _take_room(
        self, head: Sequence, preempting: dict[Sequence, Admitted], budget: StepBudget
    ) -> Admitted | None:
        """Find a row and blocks for a waiting sequence, from others if needed.

        Returns None if it must wait.
        """
        preemptor = self._preemptor
        lacks_row = self._table.num_free_rows == len(preempting)
        if lacks_row and not preemptor.preempt_for(head, preempting):
            return None
        while not isinstance(admission := self._admit(head, budget), Admitted):
            if not (preemptor.lacks_blocks(head) and preemptor.preempt_for(head, preempting)):
                # Others must not take the blocks in transit.
                is_pending = head.state is preemptor.pending
                budget.is_held = is_pending and self._kv.pool.num_in_transit > 0
                return None
        return admission

    def _swap_in(self, budget: StepBudget, acknowledged_step: int) -> None:
        """Swap sequences in while there is room; later sequences may overtake the first few."""
        num_skipped = 0
        guard = self._preemptor.guard
        for sequence in [*self._table.swapped]:
            if guard.is_reserved and sequence is not guard.starved:
                continue
            if num_skipped == MAX_SKIPPED or not self._table.has_free_row:
                return
            swapped = sequence.state
            assert isinstance(swapped, Swapped)
            if swapped.ready_step > acknowledged_step or sequence.num_pending:
                num_skipped += 1
                continue
            num_tokens, num_spare = self._size.measure(sequence)
            with Blame(sequence):
                copies = self._kv.swap_in(
                    sequence, budget.step, num_tokens=num_tokens, num_spare=num_spare
                )
            if isinstance(copies, Refusal):
                num_skipped += 1
                if copies is Refusal.NO_ROOM:
                    guard.note_failure(sequence)
                else:
                    self._table.recompute_swapped(sequence)
                continue
            budget.plan.swap_ins += copies
            self._table.start_sequence(sequence, copies_step=budget.step)
            budget.plan.add_start(sequence, None, kv=self._kv)

    def _register(self, budget: StepBudget) -> None:
        """Register the blocks that the plan fills, for sequences of later plans."""
        # After all starts: a step cannot read blocks that it computes itself.
        for sequence in budget.plan.prefilled:
            with Blame(sequence):
                self._kv.prefixes.register_blocks(sequence)
                if sequence.prompt_step == budget.step:
                    self._table.release_siblings(sequence)
