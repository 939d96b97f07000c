"""Memory of a GPU: the needs of steps and graphs, the size of the block pools, and its release."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pagedray.batch import SequencePlan, SequenceStart, StepMasks, StepPlan, pack_token_ids
from pagedray.config import MOST_SPARE_STATES, CacheSize, EngineConfig
from pagedray.errors import DeviceError, StartupError
from pagedray.layout import num_held_blocks
from pagedray.machine import available_host_bytes, host_memory_bytes
from pagedray.rank_progress import Phase, ProgressWord
from pagedray.sampling_params import MAX_LOGPROBS, SamplingParams
from workers.runner.decode_graphs import chain_sizes, graph_batch_sizes
from workers.runner.kv_cache import num_staging_blocks
from workers.runner.piece_graphs import piece_sizes
from workers.sampling.edits import num_mask_bytes
from workers.worker import release_gpu_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attention.abstract import AttentionBackend, AttentionSpec
    from workers.runner.model_runner import ModelRunner

__all__ = [
    "NO_GRAPHS",
    "GraphSizes",
    "MemoryProfile",
    "cache_size",
    "free_host_bytes",
    "graph_sizes",
    "host_pool_bytes",
    "num_rows_with_states",
    "num_staging",
    "wait_for_gpu_memory",
]

_MAX_HOST_POOL_BYTES = 4 * 2**30
"""Maximum size of the pools on a CPU, unless an option sets it."""
_MAX_PINNED_BYTES = 64 * 2**30
"""Maximum size of a CPU pool of a GPU, unless an option sets it."""
_PINNED_PART = 4
"""The CPU pools of a node take 1 / `_PINNED_PART` of its available memory, all together."""
_MOST_CPU_BLOCKS = 4
"""Maximum number of CPU blocks for each GPU block, unless an option sets their number."""
_STATE_PART = 2
"""States take at most 1 / `_STATE_PART` of the memory, unless an option sets the number of rows."""
_TIMEOUT_S = 10.0
"""How long the driver may take to free the memory, from when it was first needed."""
_POLL_S = 0.1


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
        return (
            self._bytes_of_kind(sizes.decodes, lambda tried: GraphSizes(tried, []))
            + self._bytes_of_kind(sizes.pieces, lambda tried: GraphSizes([], tried))
            + self._bytes_of_kind([*sizes.chains], lambda tried: GraphSizes([], [], tried))
        )

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


def cache_size(
    config: EngineConfig, spec: AttentionSpec, *, free_bytes: Callable[[], int], num_neighbors: int
) -> CacheSize:
    """Return the size of the pools of each of the ranks that share the host's memory.

    `free_bytes` returns the memory for the device pool; it is called if no option gives the size.
    Raises DeviceError if memory is too small.
    """
    num_blocks = config.cache.num_blocks
    if num_blocks is None:
        num_blocks = _num_fitting_blocks(config, spec, free_bytes())
    num_cpu_blocks = config.cache.num_cpu_blocks
    if num_cpu_blocks is None:
        num_most = num_blocks * (_MOST_CPU_BLOCKS if spec.device.type == "cuda" else 1)
        num_cpu_blocks = min(num_most, host_pool_bytes(config) // spec.block_bytes)
    size = CacheSize(
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        block_bytes=spec.block_bytes,
        limits=config.scheduler.limits(),
        groups=spec.group_windows,
        state_blocks=spec.state_blocks,
    )
    num_host_blocks = num_cpu_blocks
    if spec.device.type == "cpu":
        num_host_blocks += num_blocks + config.num_states * spec.state_blocks
    _check_host_memory(num_host_blocks * size.block_bytes, num_neighbors)
    return size


def num_staging(config: EngineConfig, spec: AttentionSpec, num_blocks: int) -> int:
    """Return the number of staging blocks of a device pool of `num_blocks`."""
    return num_staging_blocks(spec, num_blocks) if config.cache.has_cpu_cache else 0


def free_host_bytes(config: EngineConfig) -> int:
    """Return the bytes of host memory that the cache of one rank may take."""
    share = available_host_bytes() // 2 // config.parallel.tensor_parallel_size
    return min(_MAX_HOST_POOL_BYTES, int(share * config.cache.memory_fraction))


def host_pool_bytes(config: EngineConfig) -> int:
    """Return the bytes of the CPU pool of one rank if no option gives its size."""
    if config.parallel.device == "cpu":
        return _MAX_HOST_POOL_BYTES // 4
    # The ranks of a group may be on several nodes; then the pools are smaller than they could be.
    share = available_host_bytes() // _PINNED_PART // config.parallel.tensor_parallel_size
    return min(_MAX_PINNED_BYTES, share)


def _num_fitting_blocks(config: EngineConfig, spec: AttentionSpec, memory: int) -> int:
    """Return the blocks of a device pool that fit into memory and are of use."""
    state_bytes = config.num_states * spec.state_blocks * spec.block_bytes
    num_blocks = max(memory - state_bytes, 0) // spec.block_bytes
    num_blocks -= num_staging(config, spec, num_blocks)
    num_groups = len(spec.group_windows)
    blocks_per_sequence = num_held_blocks(
        config.max_model_len,
        windows=spec.group_windows,
        block_size=config.cache.block_size,
        step_tokens=config.max_num_batched_tokens,
    )
    # A snapshot of a state takes as many blocks as the state.
    blocks_per_sequence += spec.state_blocks
    # Room for every row at its maximum length, and as much again for cached prefixes.
    num_blocks = min(num_blocks, 2 * config.max_num_seqs * blocks_per_sequence)
    if num_blocks < 2 * num_groups:
        states = ""
        if spec.states:
            states = (
                f" and {state_bytes} bytes for {config.num_states} states of "
                f"{config.max_num_seqs} sequences ({spec.state_bytes} bytes each)"
            )
        raise DeviceError(
            f"Only {memory} bytes of {spec.device.type} memory are left for the KV cache, which "
            f"needs at least {2 * num_groups} blocks of {spec.block_bytes} bytes{states}; use a "
            "smaller model, more ranks, a lower --max-num-seqs or --max-num-batched-tokens, or a "
            "higher --memory-fraction."
        )
    return num_blocks


def num_rows_with_states(spec: AttentionSpec, num_rows: int, free_bytes: int) -> int:
    """Return how many of `num_rows` rows have room for their states in a part of free memory."""
    row_bytes = spec.state_blocks * spec.block_bytes
    if not row_bytes:
        return num_rows
    num_states = free_bytes // _STATE_PART // row_bytes
    # There are at most as many spare states as rows.
    return max(1, min(num_rows, max(num_states // 2, num_states - MOST_SPARE_STATES)))


def _check_host_memory(rank_bytes: int, num_ranks: int) -> None:
    needed, limit = rank_bytes * num_ranks, host_memory_bytes()
    if needed > limit:
        raise DeviceError(
            f"The caches of {num_ranks} {'rank' if num_ranks == 1 else 'ranks'} need "
            f"{needed / 2**30:.1f} GiB of host memory, but there are only "
            f"{limit / 2**30:.1f} GiB; use a lower --num-blocks or --num-cpu-blocks."
        )


# Any: the arguments of the function.
def wait_for_gpu_memory(function: Callable[..., object], *arguments: Any) -> None:
    """Call the function, again and again while memory that it needs is being freed."""
    deadline_s: float | None = None
    while True:
        try:
            function(*arguments)
            return
        except (torch.OutOfMemoryError, StartupError) as error:
            # A variable for the cause would outlive this block, and keep the allocations of its
            # frames.
            is_memory = isinstance(error.__cause__ or error, torch.OutOfMemoryError)
            # Loading a large model may take longer than the driver does.
            deadline_s = deadline_s or time.monotonic() + _TIMEOUT_S
            if not is_memory or time.monotonic() > deadline_s:
                raise
        release_gpu_memory()
        time.sleep(_POLL_S)


class GraphSizes(NamedTuple):
    """The sizes of the captured graphs, ascending."""

    decodes: list[int]
    """Sizes of decodes, in rows."""
    pieces: list[int]
    """Sizes of pieces, in tokens."""
    chains: Sequence[int] = ()
    """Sizes of steps with chains of models with states, in tokens."""


NO_GRAPHS = GraphSizes([], [])


def graph_sizes(
    config: EngineConfig, device: torch.device, backend: type[AttentionBackend]
) -> GraphSizes:
    """Return the sizes that a rank captures; none on a CPU."""
    if device.type != "cuda" or config.enforce_eager:
        return NO_GRAPHS
    decodes = graph_batch_sizes(config.max_num_seqs) if backend.supports_graph_capture else []
    max_tokens = min(config.max_graph_tokens, config.max_num_batched_tokens)
    has_chains = config.speculation is not None and config.model.has_states and decodes
    chains = chain_sizes(decodes) if has_chains else []
    return GraphSizes(decodes, piece_sizes(max_tokens), chains)
