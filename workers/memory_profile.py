"""Measures the GPU memory that steps and graphs need in addition to weights and cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedray.batch import SequencePlan, SequenceStart, StepMasks, StepPlan, pack_token_ids
from pagedray.rank_progress import Phase
from pagedray.sampling_params import MAX_LOGPROBS, SamplingParams
from workers.graph_sizes import NO_GRAPHS, GraphSizes
from workers.sampling.masks import num_mask_bytes
from workers.worker import release_gpu_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.config import EngineConfig
    from pagedray.rank_progress import ProgressWord
    from workers.runner.model_runner import ModelRunner

__all__ = ["MemoryProfile", "allow_all_tokens", "largest_steps"]


class MemoryProfile:
    """Measures the memory of a GPU. All ranks of a group must do so at the same time."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        progress: ProgressWord,
        make_runner: Callable[[GraphSizes], ModelRunner],
    ) -> None:
        """`make_runner` returns the runner of steps on a cache of one block."""
        self._config = config
        self._device = device
        self._progress = progress
        self._make_runner = make_runner

    def free_bytes(self, sizes: GraphSizes) -> int:
        """Return the bytes left for the cache after steps, and graphs of these sizes."""
        needed = self._step_bytes() + self._graph_bytes(sizes)
        free, total = torch.cuda.mem_get_info(self._device)
        kept = (1.0 - self._config.cache.memory_fraction) * total
        return max(0, int(free - needed - kept))

    def _step_bytes(self) -> int:
        """Return the bytes of the largest steps."""
        self._progress.enter(Phase.PROFILING)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        runner = self._make_runner(NO_GRAPHS)
        for plan in largest_steps(self._config):
            pending = runner.launch(plan)
            pending.take_masks(allow_all_tokens(plan, self._config.model.vocab_size))
            pending.output()
        step_bytes = torch.cuda.max_memory_reserved(self._device) - before
        del runner
        release_gpu_memory()
        return step_bytes

    def _graph_bytes(self, sizes: GraphSizes) -> int:
        """Return the bytes of the captured graphs, estimated from three sizes of each kind.

        The largest holds the memory pool that all share; each of the others adds its own nodes,
        more for larger sizes.
        """
        return self._bytes_of_kind(
            sizes.decodes, lambda tried: GraphSizes(tried, [])
        ) + self._bytes_of_kind(sizes.pieces, lambda tried: GraphSizes([], tried))

    def _bytes_of_kind(self, sizes: list[int], of_kind: Callable[[list[int]], GraphSizes]) -> int:
        if not sizes:
            return 0
        tried = sorted({sizes[0], *sizes[-2:]})
        before, _ = torch.cuda.mem_get_info(self._device)
        runner = self._make_runner(of_kind(tried))
        runner.forward_pass.capture_graphs(only_largest=True)
        with_largest, _ = torch.cuda.mem_get_info(self._device)
        runner.forward_pass.capture_graphs()
        with_all, _ = torch.cuda.mem_get_info(self._device)
        del runner
        release_gpu_memory()
        others = max(0, with_largest - with_all) / max(1, len(tried) - 1)
        return before - with_largest + int(others * (len(sizes) - 1))


def largest_steps(config: EngineConfig) -> list[StepPlan]:
    """Return two plans that fill all rows and the token budget: prompts, then long contexts.

    Their block tables are empty, so that all sequences read and write block 0.
    """
    num_batched_tokens = config.max_num_batched_tokens
    num_rows = min(config.max_num_seqs, num_batched_tokens)
    num_left, num_tokens = num_batched_tokens, []
    for row in range(num_rows):
        num_tokens.append(min(config.max_model_len, num_left - (num_rows - row - 1)))
        num_left -= num_tokens[-1]
    # One sequence of maximum length is enough: backends bound the memory of many of them.
    depths = [config.max_model_len] + [num_batched_tokens] * (num_rows - 1)
    contexts = [min(d, config.max_model_len - n) for d, n in zip(depths, num_tokens, strict=True)]
    # Each of these sampling features allocates buffers of its own.
    sampling = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
    return [
        StepPlan(
            step=step,
            starts=[
                SequenceStart(row, pack_token_ids([0]), 1, [], sampling, row, 0, mask_start=0)
                for row in range(num_rows)
            ],
            chunks=[
                SequencePlan(row, first_position, num_tokens[row], is_sampled=True)
                for row, first_position in enumerate(first_positions)
            ],
        )
        for step, first_positions in enumerate(([0] * num_rows, contexts))
    ]


def allow_all_tokens(plan: StepPlan, vocab_size: int) -> StepMasks:
    """Return masks that allow every token to every sequence of a plan."""
    size = num_mask_bytes(vocab_size)
    return StepMasks(plan.step, b"\xff" * size * len(plan.chunks))
