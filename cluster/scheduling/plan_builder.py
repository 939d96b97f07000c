"""A plan while it is made: the parts that are decided, and the rest of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.batch import BlockCopy, Decodes, SequencePlan, SequenceStart, StepPlan

if TYPE_CHECKING:
    from cluster.scheduling.fair_queue import Share
    from cluster.scheduling.kv_manager import KvManager
    from cluster.scheduling.sequence import Sequence
    from cluster.scheduling.speculation import Chain
    from pagedray.batch import StateSave, TextBatch

__all__ = ["PlanBuilder", "StepBudget"]

_MAX_FEW = 8
"""Waiting sequences of a tenant up to which its prompts end in short steps."""


class StepBudget:
    """The rest of a step that its plan may still use, with the plan."""

    __slots__ = (
        "_grid",
        "_max_num_tokens",
        "first_share",
        "fork_cost",
        "is_held",
        "num_other_tokens",
        "num_tokens",
        "plan",
        "step",
    )

    def __init__(self, step: int, *, num_tokens: int, grid: int) -> None:
        """Recurrent states are kept at multiples of `grid`; it is 0 without states."""
        self._grid = grid
        self.step = step
        self.plan = PlanBuilder(step)
        self._max_num_tokens = num_tokens
        self.num_tokens = num_tokens
        """Tokens that may still be added."""
        self.first_share: Share[Sequence] | None = None
        """The tenant of the first prompt that ends in this step."""
        self.num_other_tokens = 0
        """Tokens of prompts of other tenants since then."""
        self.fork_cost = 0
        """The cost of the forks so far, in tokens."""
        self.is_held = False
        """Whether nothing else may start, since a sequence is to get the blocks in transit."""

    def num_tokens_for(self, sequence: Sequence) -> int:
        """Return how many tokens a prompt may take.

        A step in which the prompt of a less served tenant ends is kept short: prompts of others
        take at most a quarter of the budget. If many requests of that tenant wait, throughput
        counts.
        """
        first = self.first_share
        if first is None or first is sequence.share or len(first.waiting) > _MAX_FEW:
            return self.num_tokens
        num_most = max(self._max_num_tokens // 4, 1)
        return min(self.num_tokens, max(num_most - self.num_other_tokens, 0))

    def is_spent_for(self, sequence: Sequence) -> bool:
        """Return whether a prompt is to have the first tokens of the next step instead.

        Its chunk would end where no state is kept, and its later chunks could not save states.
        """
        return (
            self.num_tokens < self._grid
            and bool(self.plan.prefilled)
            and self.num_tokens < sequence.length - sequence.num_computed
        )


class PlanBuilder:
    """The parts of a plan that are decided so far."""

    __slots__ = (
        "chains",
        "chunk_samples",
        "chunks",
        "copies",
        "decode_positions",
        "decodes",
        "deferred",
        "disk_reads",
        "disk_writes",
        "evictions",
        "feeds_head",
        "growing_rows",
        "is_overlapped",
        "late_copies",
        "new_block_ids",
        "num_drafts",
        "prefilled",
        "restores",
        "saves",
        "single_samples",
        "singles",
        "starts",
        "step",
        "swap_ins",
        "swap_outs",
        "texts",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.starts: list[SequenceStart] = []
        self.swap_outs: list[BlockCopy] = []
        self.swap_ins: list[BlockCopy] = []
        self.copies: list[BlockCopy] = []
        self.evictions: list[BlockCopy] = []
        """Cached blocks that are copied to the CPU pool."""
        self.restores: list[BlockCopy] = []
        """Cached blocks that are copied back."""
        self.disk_reads: list[BlockCopy] = []
        self.disk_writes: list[BlockCopy] = []
        self.decodes: list[Sequence] = []
        """Sequences that compute their last token."""
        self.decode_positions: list[int] = []
        """The positions of these tokens."""
        self.chains: list[Chain] = []
        """Decodes with drafts."""
        self.growing_rows: list[int] = []
        """The rows of `decodes` and `chains` that get a new block, once for each block."""
        self.new_block_ids: list[int] = []
        """The blocks that each of these rows gets, in each group."""
        self.chunks: list[SequencePlan] = []
        self.singles: list[SequencePlan] = []
        """Sequences of which the step computes one token."""
        self.chunk_samples: list[Sequence] = []
        self.single_samples: list[Sequence] = []
        self.prefilled: list[Sequence] = []
        """Sequences that compute known tokens."""
        self.deferred: list[Sequence] = []
        """Sequences that start with masks that must be made before their tokens are planned."""
        self.texts: TextBatch | None = None
        self.saves: list[StateSave] = []
        self.late_copies: list[BlockCopy] = []
        self.num_drafts = 0
        """Tokens that a draft head guesses for each sequence."""
        self.is_overlapped = False
        """Whether the tokens of the step before are not known."""
        self.feeds_head = True

    @property
    def is_empty(self) -> bool:
        """Whether the plan would have no effect."""
        decodes = self.decodes or self.chains
        steps = decodes or self.singles or self.chunks or self.starts or self.texts
        return not (steps or self.swap_outs or self.disk_reads)

    @property
    def num_sequences(self) -> int:
        """Sequences that compute tokens."""
        return len(self.decodes) + len(self.chunks) + len(self.singles)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that sample a single token, in the order of the output."""
        if not self.prefilled:
            return self.decodes
        return self.chunk_samples + self.single_samples + self.decodes

    def add_start(self, sequence: Sequence, donor: Sequence | None, *, kv: KvManager) -> None:
        """Start a placed sequence, with the blocks of its donor if it was forked."""
        request, ids = sequence.active.request, sequence.blocks.ids
        self.starts.append(
            SequenceStart(
                sequence.state.row,
                sequence.token_ids.tobytes() if donor is None else b"",
                sequence.num_prompt_tokens,
                ids.tolist() if donor is None else ids[-kv.groups.num_groups :].tolist(),
                request.sampling,
                request.seed,
                sequence.index,
                () if request.sampling.ignore_eos else request.eos_token_ids,
                None if sequence.masks is None else sequence.masks.start,
                -1 if donor is None else donor.state.row,
                request.bad_token_ids,
            )
        )

    def add_chunk(self, sequence: Sequence, num_tokens: int, *, kv: KvManager) -> None:
        """Compute the next `num_tokens` known tokens, and sample after the last."""
        position, end = sequence.num_computed, sequence.num_computed + num_tokens
        is_sampled = end == sequence.prefill_end
        added = sequence.blocks.extend(end, kv.block_size, kv.groups.num_groups)
        plan = SequencePlan(sequence.state.row, position, num_tokens, is_sampled, tuple(added))
        self.prefilled.append(sequence)
        if num_tokens > 1:
            self.chunks.append(plan)
        else:
            self.singles.append(plan)
        if is_sampled:
            (self.chunk_samples if num_tokens > 1 else self.single_samples).append(sequence)

    def build_plan(self) -> StepPlan:
        """Return the plan: chunks of several tokens, then of a single token, then decodes."""
        rows = [sequence.state.row for sequence in self.decodes]
        positions = self.decode_positions
        draft_ids: list[int] = []
        for chain in self.chains:
            num_tokens = len(chain.draft_ids) + 1
            rows += [chain.sequence.state.row] * num_tokens
            positions += range(chain.position, chain.position + num_tokens)
            if not chain.is_guessed:
                draft_ids += chain.draft_ids
        return StepPlan(
            self.step,
            self.chunks + self.singles,
            self.starts,
            Decodes.pack(rows, positions, self.growing_rows, self.new_block_ids, draft_ids),
            self.swap_outs,
            self.swap_ins + self.restores,
            self.copies,
            self.evictions,
            self.disk_reads,
            self.disk_writes,
            self.texts,
            self.saves,
            self.late_copies,
            self.num_drafts,
            self.is_overlapped,
            self.feeds_head,
        )
