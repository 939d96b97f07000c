"""From a plan to sampled tokens: input batch, forward pass, logits, sampler.

The runner knows no requests, and other ranks only through the collectives inside the model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from pagedray.batch import TOKEN_ID_BYTES, SequenceStart, StepMasks, StepPlan
from pagedray.rank_progress import Phase, ProgressWord
from workers.device_event import record_event
from workers.runner.block_swaps import (
    BlockSwaps,
    CudaStream,
    HostStream,
    StagingBlocks,
    StepStream,
    SwapStreams,
)
from workers.runner.input_batch import draft_ids_of
from workers.runner.pending_tokens import LastStep, PendingTokens, Sample
from workers.runner.step_graphs import dropped_capture
from workers.sampling.edits import Chains

if TYPE_CHECKING:
    from workers.runner.drafting import Drafting
    from workers.runner.forward_pass import ForwardPass
    from workers.runner.input_batch import InputBatch, StepInputs
    from workers.runner.kv_cache import KVCache
    from workers.sampler import Sampled, Sampler
    from workers.sampling.logprobs import PromptReport

__all__ = ["ModelRunner", "Prompts", "completed_plan"]


class ModelRunner:
    """Runs the steps of one rank."""

    def __init__(
        self,
        *,
        forward_pass: ForwardPass,
        cache: KVCache,
        batch: InputBatch,
        sampler: Sampler,
        progress: ProgressWord,
        drafting: Drafting | None = None,
    ) -> None:
        """Without `drafting`, there is no draft head."""
        self.forward_pass = forward_pass
        self._cache = cache
        self._swaps = _make_swaps(cache)
        self._batch = batch
        self._sampler = sampler
        self._progress = progress
        self._drafting = drafting
        self._prompts = Prompts()
        self._latest: tuple[StepPlan, PendingTokens] | None = None
        """The latest step that an overlapped plan may follow."""
        self._last_step = LastStep()

    @torch.inference_mode()
    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels that sample from logits of this dtype."""
        self._progress.enter(Phase.WARMING_UP)
        self._sampler.warm_up(dtype)
        if self._drafting is not None or self._batch.counts_refused:
            self._batch.warm_up()
        if self._drafting is not None:
            self._drafting.warm_up()

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        """Capture graphs, as `ForwardPass` and `Drafting` do."""
        self.forward_pass.capture_graphs(only_largest=only_largest)
        if self._drafting is not None:
            self._drafting.capture_graphs(only_largest=only_largest)

    def capture_next(self) -> bool:
        """Capture a missing graph; return False if none is missing."""
        if self.forward_pass.capture_next():
            return True
        return self._drafting is not None and self._drafting.capture_next()

    @torch.inference_mode()
    def compile_kernels(self, dtype: torch.dtype, num_threads: int) -> None:
        """Compile in parallel the kernels of graphs, and of sampling from logits of this dtype.

        All ranks of a group must do this at the same time.
        """
        from attention.kernels.triton.kernel_launcher import ParallelCompilation

        with ParallelCompilation(num_threads) as compilation:
            with dropped_capture(torch.cuda.Stream(self._cache.device_pool.device)):
                self._sampler.warm_up(dtype)
            self.forward_pass.trace_graphs()
            for count in compilation.wait():
                self._progress.enter(Phase.WARMING_UP, count)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingTokens:
        """Launch the step of a plan; on a GPU, return before its kernels have run."""
        self._progress.enter(Phase.PREPARING)
        if plan.is_overlapped and not self._can_shorten(plan):
            assert self._latest is not None
            before, pending = self._latest
            plan = completed_plan(plan, before, pending.sampled())
        if plan.starts:
            plan = msgspec.structs.replace(plan, starts=self._prompts.complete_starts(plan.starts))
        for start in plan.starts:
            self._sampler.start(start)
        self._batch.apply_plan(plan)
        device = self._cache.device_pool.device
        fence = self._swaps.launch(plan)
        started = record_event(device)
        self._cache.copy_blocks(plan.copies)
        if self._cache.states:
            self._cache.clear_states(self._batch.first_rows(plan))
        sample, needs_masks = None, False
        prompt_reports: list[PromptReport] = []
        if plan.num_tokens:
            inputs = self._batch.prepare_inputs(plan)
            hidden = self.forward_pass.hidden_states(inputs)
            if inputs.prompt_chunks:
                num_sampled = len(inputs.sampled_rows)
                prompt_reports = self._sampler.describe_prompts(
                    inputs.prompt_chunks,
                    hidden[num_sampled:],
                    lambda rows: self.forward_pass.logits(rows).whole(),
                )
                hidden = hidden[:num_sampled]
            if len(inputs.sampled_rows):
                needs_masks = self._sampler.has_masked(
                    inputs.sampled_rows, inputs.sampled_positions
                )
                choose = self._choose(inputs, hidden)
                sample = partial(self._sample, inputs, choose, plan)
            elif self._drafting is not None and plan.feeds_head:
                self._drafting.run(inputs, None, 0)
            self._cache.copy_blocks(plan.late_copies)
        pending = PendingTokens(
            plan.step,
            sample,
            needs_masks=needs_masks,
            started=started,
            last_step=self._last_step,
            swaps=self._swaps,
            fence=fence,
            device=device,
            prompt_reports=prompt_reports,
        )
        if self._drafting is not None or plan.decodes.draft_ids:
            self._latest = plan, pending
        return pending

    def _can_shorten(self, plan: StepPlan) -> bool:
        """Return whether the device can complete an overlapped plan."""
        if not self._batch.table.has_refused:
            return False
        rows = np.frombuffer(plan.decodes.rows, np.int32).astype(np.int64)
        return self.forward_pass.takes_excess and self._sampler.only_draws(rows)

    def _choose(self, inputs: StepInputs, hidden: torch.Tensor) -> Sample:
        """Return a function that samples the tokens of a step, given its masks."""
        logits = self.forward_pass.logits(hidden)
        rows, positions = inputs.sampled_rows, inputs.sampled_positions
        exact = inputs.sampled_places[1] if inputs.is_overlapped else None
        if logits.is_sharded and not self._sampler.needs_whole(rows, positions):
            return lambda _: self._sampler.sample_sharded(logits, rows, positions, exact)
        sample = partial(
            self._sampler.sample,
            logits.whole(),
            rows,
            positions,
            draft_ids=inputs.draft_ids,
            exact_positions=exact,
        )
        return lambda masks: sample() if masks is None else sample(masks.words, masks.released)

    def _sample(
        self, inputs: StepInputs, choose: Sample, plan: StepPlan, masks: StepMasks | None
    ) -> Sampled:
        self._progress.enter(Phase.SAMPLING)
        sampled = choose(masks)
        if inputs.has_kept_states:
            self.forward_pass.accept_drafts(sampled.token_ids)
        token_ids = self._batch.append_sampled(inputs, sampled.token_ids)
        if self._drafting is None or not plan.feeds_head:
            return replace(sampled, token_ids=token_ids)
        draft_ids = self._drafting.run(inputs, sampled.token_ids, plan.num_drafts)
        return replace(sampled, token_ids=token_ids, draft_ids=draft_ids)


def completed_plan(plan: StepPlan, before: StepPlan, sampled: Sampled) -> StepPlan:
    """Return an overlapped plan with the positions and drafts that it lacks.

    `before` is the plan of the step before, not overlapped, and `sampled` are its tokens and the
    guesses behind them, on the host.
    """
    assert not before.is_overlapped
    rows = np.frombuffer(plan.decodes.rows, np.int32)
    depths = Chains(draft_ids_of(plan.decodes, len(rows))).depths
    is_draft = depths > 0
    rows_before = np.frombuffer(before.decodes.rows, np.int32)
    chains = Chains(draft_ids_of(before.decodes, len(rows_before)))
    num_refused, indices = np.zeros((2, 1 + int(rows_before.max())), dtype=np.int32)
    of_chains = rows_before[chains.firsts]
    num_refused[of_chains] = chains.lengths - chains.num_tokens(sampled.token_ids)
    indices[of_chains] = np.arange(len(of_chains))
    draft_ids = np.frombuffer(plan.decodes.draft_ids, np.int32)
    if is_draft.any() and not len(draft_ids):
        assert sampled.draft_ids is not None
        guesses = sampled.draft_ids.numpy()[indices[rows[is_draft]], depths[is_draft] - 1]
        draft_ids = guesses.astype(np.int32)
    positions = np.frombuffer(plan.decodes.positions, np.int32) - num_refused[rows]
    decodes = msgspec.structs.replace(
        plan.decodes, positions=positions.tobytes(), draft_ids=draft_ids.tobytes()
    )
    return msgspec.structs.replace(plan, decodes=decodes, is_overlapped=False)


def _make_swaps(cache: KVCache) -> BlockSwaps:
    """Return the copies between the pools, on streams of their own on a GPU."""
    device = cache.device_pool.device
    if device.type == "cuda" and len(cache.host_pool.blocks):
        streams = SwapStreams(
            steps=StepStream(device), outward=CudaStream(device), inward=CudaStream(device)
        )
    else:
        streams = SwapStreams(steps=HostStream(), outward=HostStream(), inward=HostStream())
    staging = StagingBlocks(first_block=cache.first_staging, num_blocks=cache.num_staging)
    return BlockSwaps(cache, streams, staging)


class Prompts:
    """Keeps the prompt of each row, packed as in its start, until another starts there.

    Rows that have it from a donor share its copy.
    """

    def __init__(self) -> None:
        self._by_row: dict[int, bytes] = {}

    def complete_starts(self, starts: list[SequenceStart]) -> list[SequenceStart]:
        """Return starts in which each sequence with a donor has the donor's prompt as tokens."""
        completed: list[SequenceStart] = []
        # In order, since a later start may take the row of a donor.
        for start in starts:
            if start.donor_row < 0:
                self._by_row[start.row] = start.token_ids[
                    : start.num_prompt_tokens * TOKEN_ID_BYTES
                ]
                completed.append(start)
                continue
            prompt = self._by_row[start.row] = self._by_row[start.donor_row]
            completed.append(msgspec.structs.replace(start, token_ids=prompt))
        return completed
