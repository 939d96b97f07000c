"""A step plan while it is being made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.batch import BlockCopy, Decodes, SequencePlan, SequenceStart, StepPlan

if TYPE_CHECKING:
    from cluster.scheduling.fair_queue import Share
    from cluster.scheduling.sequence import Sequence

__all__ = ["PlanDraft"]


class PlanDraft:
    """The parts of a plan that are decided so far."""

    __slots__ = (
        "budget",
        "chunk_samples",
        "chunks",
        "copies",
        "decode_positions",
        "decodes",
        "disk_reads",
        "disk_writes",
        "evictions",
        "first_share",
        "fork_cost",
        "growing_rows",
        "is_held",
        "new_block_ids",
        "num_other_tokens",
        "num_stalled",
        "prefilled",
        "restores",
        "single_samples",
        "singles",
        "starts",
        "step",
        "swap_ins",
        "swap_outs",
    )

    def __init__(self, step: int, *, budget: int) -> None:
        self.step = step
        self.budget = budget
        """Tokens that may still be added."""
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
        self.first_share: Share[Sequence] | None = None
        """The tenant of the first prompt that ends in this step."""
        self.fork_cost = 0
        """The cost of the forks so far, in tokens."""
        self.num_other_tokens = 0
        """Tokens of prompts of other tenants since then."""
        self.is_held = False
        """Whether nothing else may start, since a sequence is to get the blocks in transit."""
        self.num_stalled = 0
        """Running sequences that wait a step for a block."""

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
        self.budget -= num_tokens
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
