"""One rank: its device, its part of the model, its cache, its steps.

Whether it runs inside the controller's process or inside a Ray actor is not known here.
"""

from __future__ import annotations

import gc
import logging
import os
from typing import TYPE_CHECKING

import torch

from attention.selector import select_backend
from pagedray.batch import EmbedPlan, SequencePlan, SequenceStart, StepMasks, StepPlan
from pagedray.errors import DeviceError, StartupError
from pagedray.request import MAX_LOGPROBS, SamplingParams
from workers.cuda_graphs import DecodeGraphs, batch_sizes
from workers.input_batch import InputBatch
from workers.kv_cache import KVCache, block_bytes
from workers.model_runner import ModelRunner, PendingStep
from workers.models.decoder import Decoder
from workers.models.self_attention import attention_spec
from workers.sampler import Sampler
from workers.sampling.masks import num_mask_bytes
from workers.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionBackend, AttentionSpec
    from pagedray.config import EngineConfig
    from workers.parallel import ParallelGroup

__all__ = ["Worker", "backend_of", "device_of", "num_threads_of", "release_memory"]

logger = logging.getLogger(__name__)

_CPU_POOL_BYTES = 4 * 2**30
"""Most that a pool takes when its size is left to us and memory is the CPU's."""


class Worker:
    """One rank of a group. Call `load`, then `allocate_cache`, then `launch`."""

    def __init__(self, config: EngineConfig, group: ParallelGroup) -> None:
        self._config = config
        self._group = group
        self._device = device_of(config, group)
        if self._device.type == "cpu":
            torch.set_num_threads(num_threads_of(config))
        self._spec = attention_spec(
            config.model,
            group,
            block_size=config.cache.block_size,
            device=self._device,
            kv_cache_dtype=config.cache.kv_cache_dtype,
            max_seq_len=config.max_model_len,
        )
        self._backend = backend_of(config.attention_backend, self._spec)
        self._model: Decoder | None = Decoder(
            config.model, group, backend=self._backend, device=self._device
        )
        self._runner: ModelRunner | None = None

    def load(self, report_progress: Callable[[int, int], None]) -> None:
        """Fill the weights, telling (tensors done, tensors in all) as it goes."""
        assert self._model is not None
        load_weights(self._model, self._config, report_progress)

    def fitting_blocks(self) -> tuple[int, int]:
        """Return how many blocks the device pool and the CPU pool may have on this rank."""
        size = block_bytes(self._spec)
        blocks_per_sequence = -(-self._config.max_model_len // self._config.cache.block_size)
        # Room for every row at its longest, and as much again for prefixes.
        wanted = 2 * self._config.scheduler.max_num_seqs * blocks_per_sequence
        num_blocks = self._config.cache.num_blocks
        if num_blocks is None:
            memory = self._cache_bytes()
            num_blocks = min(wanted, memory // size)
            if num_blocks < 2:
                raise DeviceError(
                    f"{memory} bytes of {self._device.type} memory are left for the KV cache, "
                    f"less than two blocks of {size} bytes."
                )
        num_cpu_blocks = self._config.cache.num_cpu_blocks
        if num_cpu_blocks is None:
            num_cpu_blocks = min(num_blocks, _CPU_POOL_BYTES // 4 // size)
        return num_blocks, num_cpu_blocks

    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> dict[str, dict[str, int]]:
        """Allocate both pools; steps may be launched from then on.

        Return how many layers each provider of attention kernels serves, by part of a step.
        """
        self._runner = self._make_runner(num_blocks, num_cpu_blocks, self._graph_sizes)
        if self._group.rank == 0:
            # The layers of all ranks are alike.
            for sentence in self._runner.attention_provider_sentences:
                logger.info("Attention: %s", sentence)
        return self._runner.attention_providers

    def launch(self, plan: StepPlan | EmbedPlan) -> PendingStep:
        """Carry out one plan, which for a decoder is never to embed."""
        assert isinstance(plan, StepPlan)
        assert self._runner is not None
        return self._runner.launch(plan)

    def close(self) -> None:
        """Release the device and leave the group."""
        # Whoever closed an engine may still hold it, and wants its memory for another one.
        self._runner = self._model = None
        if self._device.type == "cuda":
            release_memory()
        self._group.close()

    def _make_runner(
        self, num_blocks: int, num_cpu_blocks: int, graph_sizes: list[int]
    ) -> ModelRunner:
        assert self._model is not None
        scheduler = self._config.scheduler
        cache = KVCache(
            self._backend, self._spec, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks
        )
        graphs = None
        if graph_sizes:
            graphs = DecodeGraphs(
                self._model, self._backend, self._spec, cache.device_pool, sizes=graph_sizes
            )
            graphs.capture()
        return ModelRunner(
            model=self._model,
            cache=cache,
            builder=self._backend.make_metadata_builder(self._spec),
            state=self._backend.get_state_cls()(self._spec),
            graphs=graphs,
            batch=InputBatch(
                max_num_rows=scheduler.max_num_seqs,
                max_model_len=self._config.max_model_len,
                block_size=self._spec.block_size,
                device=self._device,
            ),
            sampler=Sampler(
                max_num_rows=scheduler.max_num_seqs,
                vocab_size=self._config.model.vocab_size,
                device=self._device,
            ),
        )

    @property
    def _graph_sizes(self) -> list[int]:
        """Return the batch sizes whose decodes are captured."""
        is_served = self._device.type == "cuda" and self._backend.supports_graph_capture
        if not is_served or self._config.enforce_eager:
            return []
        return batch_sizes(self._config.scheduler.max_num_seqs)

    def _cache_bytes(self) -> int:
        """Return what the device pool may take."""
        if self._device.type == "cpu":
            return _free_host_bytes(self._config)
        step_bytes = self._step_bytes() + self._graph_bytes()
        free, total = torch.cuda.mem_get_info(self._device)
        kept = (1.0 - self._config.cache.memory_fraction) * total
        return max(0, int(free - step_bytes - kept))

    def _step_bytes(self) -> int:
        """Return what the largest steps take of a GPU beside weights and cache, by running them.

        Every rank of a group must do so at the same time.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        runner = self._make_runner(num_blocks=1, num_cpu_blocks=0, graph_sizes=[])
        for plan in _largest_steps(self._config):
            pending = runner.launch(plan)
            pending.take_masks(_everything(plan, self._config.model.vocab_size))
            pending.output()
        step_bytes = torch.cuda.max_memory_reserved(self._device) - before
        del runner
        release_memory()
        return step_bytes

    def _graph_bytes(self) -> int:
        """Return what the captured graphs will take, from the two largest of them.

        The largest holds the memory that all share; each of the others adds its own records.
        """
        sizes = self._graph_sizes
        if not sizes:
            return 0
        shared = self._bytes_of_graphs(sizes[-1:])
        record = max(0, self._bytes_of_graphs(sizes[-2:]) - shared)
        return shared + record * (len(sizes) - 1)

    def _bytes_of_graphs(self, sizes: list[int]) -> int:
        before, _ = torch.cuda.mem_get_info(self._device)
        runner = self._make_runner(num_blocks=1, num_cpu_blocks=0, graph_sizes=sizes)
        after, _ = torch.cuda.mem_get_info(self._device)
        del runner
        release_memory()
        return before - after


def release_memory() -> None:
    """Give back what a GPU holds for nobody."""
    # Captured graphs hold memory and the group's collectives, and must not live on in some cycle.
    gc.collect()
    torch.cuda.empty_cache()


def device_of(config: EngineConfig, group: ParallelGroup) -> torch.device:
    """Return the device of a rank. Raises DeviceError."""
    if config.parallel.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("device cuda is not to be had on this machine; use cpu.")
    # Ray shows an actor only the GPUs that are its own; a local rank sees all of them.
    return torch.device("cuda", min(group.rank, torch.cuda.device_count() - 1))


def backend_of(name: str, spec: AttentionSpec) -> type[AttentionBackend]:
    """Return the attention backend of a name. Raises StartupError with every reason."""
    try:
        return select_backend(name, spec)
    except ValueError as error:
        raise StartupError(str(error)) from error


def num_threads_of(config: EngineConfig) -> int:
    """Return the CPU threads of a rank."""
    if config.parallel.num_threads is not None:
        return config.parallel.num_threads
    return max(1, len(os.sched_getaffinity(0)) // config.parallel.tensor_parallel_size)


def _free_host_bytes(config: EngineConfig) -> int:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = available // 2 // config.parallel.tensor_parallel_size
    return min(_CPU_POOL_BYTES, int(share * config.cache.memory_fraction))


def _largest_steps(config: EngineConfig) -> list[StepPlan]:
    """Return plans that fill every row and the token budget: fresh prompts, then long contexts.

    Their block tables are empty, so that all of them read and write block 0.
    """
    num_batched_tokens = config.scheduler.max_num_batched_tokens
    num_rows = min(config.scheduler.max_num_seqs, num_batched_tokens)
    num_left, num_tokens = num_batched_tokens, []
    for row in range(num_rows):
        num_tokens.append(min(config.max_model_len, num_left - (num_rows - row - 1)))
        num_left -= num_tokens[-1]
    # One sequence at its longest is enough, since backends bound what many of them take together.
    depths = [config.max_model_len] + [num_batched_tokens] * (num_rows - 1)
    contexts = [min(d, config.max_model_len - n) for d, n in zip(depths, num_tokens, strict=True)]
    # Each of these needs memory of its own; together they are all that sampling has.
    sampling = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
    return [
        StepPlan(
            step=step,
            starts=[
                SequenceStart(row, [0], 1, [], sampling, row, 0, is_masked=True)
                for row in range(num_rows)
            ],
            sequences=[
                SequencePlan(row, first_position, num_tokens[row], is_sampled=True)
                for row, first_position in enumerate(first_positions)
            ],
        )
        for step, first_positions in enumerate(([0] * num_rows, contexts))
    ]


def _everything(plan: StepPlan, vocab_size: int) -> StepMasks:
    """Return masks that allow every sequence of a plan every token."""
    size = num_mask_bytes(vocab_size)
    return StepMasks(plan.step, b"\xff" * size * len(plan.sequences))
