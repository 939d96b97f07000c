"""From a plan to sampled tokens: input batch, forward pass, logits, sampler.

The runner knows no requests, and other ranks only through the collectives inside the model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from pagedray.batch import StepMasks, StepOutput, StepPlan
from pagedray.rank_progress import Phase, ProgressWord
from workers.device_event import DeviceEvent, record_event
from workers.models.step_attention import CachedAttention
from workers.runner.block_swaps import BlockSwaps, SwapStreams
from workers.runner.device_stream import CudaStream, HostStream, StepStream
from workers.runner.graphs.dropped_capture import dropped_capture
from workers.runner.prompts import Prompts
from workers.runner.staging_blocks import StagingBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attention.abstract import AttentionMetadataBuilder, AttentionState
    from workers.models.decoder import Decoder
    from workers.runner.graphs.decode_graphs import DecodeGraphs
    from workers.runner.graphs.piece_graphs import PieceGraphs
    from workers.runner.input_batch import InputBatch, StepInputs
    from workers.runner.kept_pool.checksum_jobs import ChecksumJobs, Fence
    from workers.runner.kv_cache import KVCache
    from workers.runner.sampled_attention import SampledAttention
    from workers.sampler import Sampled, Sampler
    from workers.sampling.prompt_logprobs import PromptReport

__all__ = ["ModelRunner", "PendingTokens"]

_Sample: TypeAlias = "Callable[[StepMasks | None], Sampled]"
"""Samples the tokens of a step, given its masks if it needs some."""


class PendingTokens:
    """A step that was launched; the device may still compute its tokens.

    A step that needs masks samples its tokens once it has them.
    """

    def __init__(
        self,
        step: int,
        sample: _Sample | None,
        *,
        needs_masks: bool,
        started: DeviceEvent,
        swaps: BlockSwaps,
        fence: Fence,
        device: torch.device,
        prompt_reports: Sequence[PromptReport] = (),
    ) -> None:
        """`sample` takes the masks; the `fence` is of the `swaps` up to this step."""
        self._prompt_reports = prompt_reports
        self.step = step
        self.needs_masks = needs_masks
        self._sample = sample
        self._sampled: Sampled | None = None
        self._started = started
        self._swaps = swaps
        self._fence = fence
        self._device = device
        self._done: DeviceEvent | None = None
        if not needs_masks:
            self._finish(None)

    def take_masks(self, masks: StepMasks) -> None:
        assert self.needs_masks
        assert masks.step == self.step
        self.needs_masks = False
        self._finish(masks)

    @property
    def is_ready(self) -> bool:
        return self._done is not None and self._done.query()

    @property
    def is_copied(self) -> bool:
        """Whether the copies between the pools of this step and earlier ones have ended."""
        return self._fence.is_reached

    def output(self) -> StepOutput:
        """Return the sampled tokens and timings; waits for the device, not for masks or copies."""
        assert self._done is not None
        self._done.synchronize()
        sampled = self._sampled
        num_swapped, swap_s = self._swaps.take_measurement()
        return StepOutput(
            step=self.step,
            token_ids=[] if sampled is None else sampled.token_ids.tolist(),
            logprobs=[] if sampled is None else sampled.logprobs,
            forward_s=self._started.elapsed_time(self._done) / 1e3,
            swap_s=swap_s,
            prompt_logprobs=[report.as_message() for report in self._prompt_reports],
            num_swapped=num_swapped,
            is_acknowledged=self.is_copied,
        )

    @torch.inference_mode()
    def _finish(self, masks: StepMasks | None) -> None:
        if self._sample is not None:
            # The tokens are on the host before the step's event.
            self._sampled = self._sample(masks)
            self._sample = None
        self._done = record_event(self._device)


class ModelRunner:
    """Runs the steps of one rank."""

    def __init__(
        self,
        *,
        model: Decoder,
        cache: KVCache,
        builder: AttentionMetadataBuilder,
        state: AttentionState,
        batch: InputBatch,
        sampler: Sampler,
        progress: ProgressWord,
        decode_graphs: DecodeGraphs | None = None,
        piece_graphs: PieceGraphs | None = None,
        sampled_attention: SampledAttention | None = None,
        checksum_jobs: ChecksumJobs | None = None,
    ) -> None:
        """A step that no graphs can replay runs eagerly, with `sampled_attention` if given."""
        self._checksum_jobs = checksum_jobs
        self._progress = progress
        self._model = model
        self._cache = cache
        self._swaps = _make_swaps(cache)
        self._builder = builder
        self._state = state
        self._decode_graphs = decode_graphs
        self._piece_graphs = piece_graphs
        self._sampled_attention = sampled_attention
        self._batch = batch
        self._sampler = sampler
        self._prompts = Prompts()

    @property
    def attention_providers(self) -> dict[str, dict[str, int]]:
        """Layers that each provider of attention kernels serves, by part of a step."""
        return self._builder.providers()

    @property
    def attention_provider_sentences(self) -> list[str]:
        """Sentences that say which provider serves which layers, and why."""
        return self._builder.provider_sentences()

    @torch.inference_mode()
    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels that sample from logits of this dtype."""
        self._progress.enter(Phase.WARMING_UP)
        self._sampler.warm_up(dtype)

    @torch.inference_mode()
    def compile_kernels(self, dtype: torch.dtype, num_threads: int) -> None:
        """Compile in parallel the kernels of graphs, and of sampling from logits of this dtype.

        All ranks of a group must do this at the same time.
        """
        from attention.kernels.triton.launches.parallel_compilation import ParallelCompilation

        with ParallelCompilation(num_threads) as compilation:
            with dropped_capture(torch.cuda.Stream(self._cache.device_pool.device)):
                self._sampler.warm_up(dtype)
            for graphs in (self._decode_graphs, self._piece_graphs):
                if graphs is not None:
                    graphs.trace()
            for count in compilation.wait():
                self._progress.enter(Phase.WARMING_UP, count)

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        """Capture all graphs. All ranks of a group must do this at the same time."""
        for graphs in (self._decode_graphs, self._piece_graphs):
            if graphs is not None:
                graphs.capture_graphs(only_largest=only_largest)

    def capture_next(self) -> bool:
        """Capture the smallest of the missing graphs; return False if none is missing."""
        graphs = [one for one in (self._decode_graphs, self._piece_graphs) if one is not None]
        incomplete = [one for one in graphs if one.missing_sizes]
        if incomplete:
            min(incomplete, key=lambda one: one.missing_sizes[0]).capture_next()
        return bool(incomplete)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingTokens:
        """Launch the step of a plan; on a GPU, return before its kernels have run."""
        self._progress.enter(Phase.PREPARING)
        if plan.starts:
            plan = msgspec.structs.replace(plan, starts=self._prompts.complete_starts(plan.starts))
        for start in plan.starts:
            self._sampler.start(start)
        self._batch.apply_plan(plan)
        device = self._cache.device_pool.device
        fence: Fence = self._swaps.launch(plan)
        if self._checksum_jobs is not None:
            fence = self._checksum_jobs.follow(fence, plan)
        started = record_event(device)
        self._cache.copy_blocks(plan.copies)
        sample, needs_masks = None, False
        prompt_reports: list[PromptReport] = []
        if plan.num_tokens:
            inputs = self._batch.prepare_inputs(plan)
            hidden = self._hidden(inputs)
            if inputs.prompt_chunks:
                num_sampled = len(inputs.sampled_rows)
                prompt_reports = self._sampler.describe_prompts(
                    inputs.prompt_chunks,
                    hidden[num_sampled:],
                    lambda rows: self._model.logits(rows).whole(),
                )
                hidden = hidden[:num_sampled]
            if len(inputs.sampled_rows):
                needs_masks = self._sampler.has_masked(
                    inputs.sampled_rows, inputs.sampled_positions
                )
                sample = partial(self._sample, inputs, self._choose(inputs, hidden))
        return PendingTokens(
            plan.step,
            sample,
            needs_masks=needs_masks,
            started=started,
            swaps=self._swaps,
            fence=fence,
            device=device,
            prompt_reports=prompt_reports,
        )

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        """Return the normed hidden states of `logits_indices`."""
        metadata = self._builder.build(inputs.attention)
        if self._decode_graphs is not None and self._decode_graphs.can_replay(inputs):
            return self._decode_graphs.replay(inputs, metadata)
        self._state.begin_forward(metadata)
        if self._piece_graphs is not None and self._piece_graphs.can_replay(inputs):
            return self._piece_graphs.replay(inputs, metadata)
        attention = CachedAttention(self._cache.device_pool, metadata)
        last = None
        if self._sampled_attention is not None:
            last = self._sampled_attention.of_step(inputs, metadata)
        return self._model.forward(
            inputs.token_ids, inputs.positions, attention, inputs.logits_indices, last
        )

    def _choose(self, inputs: StepInputs, hidden: torch.Tensor) -> _Sample:
        """Return a function that samples the tokens of a step, given its masks."""
        logits = self._model.logits(hidden)
        rows, positions = inputs.sampled_rows, inputs.sampled_positions
        if logits.is_sharded and self._sampler.is_greedy(rows, positions):
            return lambda _: self._sampler.take_likeliest(logits)
        sample = partial(self._sampler.sample, logits.whole(), rows, positions)
        return lambda masks: sample() if masks is None else sample(masks.words, masks.released)

    def _sample(
        self,
        inputs: StepInputs,
        choose: _Sample,
        masks: StepMasks | None,
    ) -> Sampled:
        self._progress.enter(Phase.SAMPLING)
        sampled = choose(masks)
        return replace(sampled, token_ids=self._batch.append_sampled(inputs, sampled.token_ids))


def _make_swaps(cache: KVCache) -> BlockSwaps:
    """Return the copies between the pools, on streams of their own on a GPU."""
    device = cache.device_pool.device
    if device.type == "cuda" and len(cache.host_pool.blocks):
        streams = SwapStreams(
            steps=StepStream(device), outward=CudaStream(device), inward=CudaStream(device)
        )
    else:
        streams = SwapStreams(steps=HostStream(), outward=HostStream(), inward=HostStream())
    staging = StagingBlocks(first_block=len(cache.device_pool), num_blocks=cache.num_staging)
    return BlockSwaps(cache, streams, staging)
