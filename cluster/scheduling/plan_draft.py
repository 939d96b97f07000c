"""A step plan while it is being made, and the rest of the step that the plan may still use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.batch import BlockCopy, Decodes, SequencePlan, SequenceStart, StepPlan

if TYPE_CHECKING:
    from cluster.scheduling.fair_queue import Share
    from cluster.scheduling.sequence import Sequence

__all__ = ["PlanDraft", "StepBudget"]

_MAX_FEW = 8
"""Waiting sequences of a tenant up to which its prompts end in short steps."""


class StepBudget:
    """The rest of a step that its plan may still use, with the plan."""

    __slots__ = (
        "_max_num_tokens",
        "draft",
        "first_share",
        "fork_cost",
        "is_held",
        "num_other_tokens",
        "num_stalled",
        "num_tokens",
        "step",
    )

    def __init__(self, step: int, *, num_tokens: int) -> None:
        self.step = step
        self.draft = PlanDraft(step)
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
        self.num_stalled = 0
        """Running sequences that wait a step for a block."""

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


class PlanDraft:
    """The parts of a plan that are decided so far."""

    __slots__ = (
        "chunk_samples",
        "chunks",
        "copies",
        "decode_positions",
        "decodes",
        "disk_reads",
        "disk_writes",
        "evictions",
        "growing_rows",
        "new_block_ids",
        "prefilled",
        "restores",
        "single_samples",
        "singles",
        "starts",
        "step",
        "swap_ins",
        "swap_outs",
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
        self.growing_rows: list[int] = []
        """The rows of `decodes` that get a new block."""
        self.new_block_ids: list[int] = []
        """The blocks that these rows get."""
        self.chunks: list[SequencePlan] = []
        self.singles: list[SequencePlan] = []
        """Sequences of which the step computes one token."""
        self.chunk_samples: list[Sequence] = []
        self.single_samples: list[Sequence] = []
        self.prefilled: list[Sequence] = []
        """Sequences that compute known tokens."""

    @property
    def is_empty(self) -> bool:
        """Whether the plan would have no effect."""
        steps = self.decodes or self.singles or self.chunks or self.starts
        return not (steps or self.swap_outs or self.disk_reads)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that sample a token, in the order of the output."""
        return self.chunk_samples + self.single_samples + self.decodes

    def add_start(self, sequence: Sequence) -> None:
        """Start a sequence that has a row."""
        request, ids = sequence.active.request, sequence.blocks.ids
        has_donor = sequence.donor_row >= 0
        self.starts.append(
            SequenceStart(
                sequence.row,
                b"" if has_donor else sequence.token_ids.tobytes(),
                sequence.num_prompt_tokens,
                ids[-1:].tolist() if has_donor else ids.tolist(),
                request.sampling,
                request.seed,
                sequence.index,
                () if request.sampling.ignore_eos else request.eos_token_ids,
                None if sequence.masks is None else sequence.masks.start,
                sequence.donor_row,
                request.bad_token_ids,
            )
        )
        sequence.donor_row = -1

    def add_chunk(self, sequence: Sequence, num_tokens: int, new_block_ids: list[int]) -> None:
        """Compute the next `num_tokens` known tokens, and sample after the last."""
        position = sequence.num_computed
        is_sampled = position + num_tokens == sequence.prefill_end
        plan = SequencePlan(sequence.row, position, num_tokens, is_sampled, tuple(new_block_ids))
        self.prefilled.append(sequence)
        if num_tokens > 1:
            self.chunks.append(plan)
        else:
            self.singles.append(plan)
        if is_sampled:
            (self.chunk_samples if num_tokens > 1 else self.single_samples).append(sequence)

    def build_plan(self) -> StepPlan:
        """Return the plan: chunks of several tokens, then of a single token, then decodes."""
        return StepPlan(
            self.step,
            self.chunks + self.singles,
            self.starts,
            Decodes.pack(
                [sequence.row for sequence in self.decodes],
                self.decode_positions,
                self.growing_rows,
                self.new_block_ids,
            ),
            self.swap_outs,
            self.swap_ins + self.restores,
            self.copies,
            self.evictions,
            self.disk_reads,
            self.disk_writes,
        )
