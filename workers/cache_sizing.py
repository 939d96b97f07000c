"""How many blocks the pools of a rank have: by its options, or by the memory that is available.

The memory that the steps of a GPU leave free is measured by `memory_profile`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.config import CacheSize
from pagedray.errors import DeviceError
from pagedray.machine import available_host_bytes, host_memory_bytes
from workers.runner.kv_cache import block_bytes, num_staging_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionSpec
    from pagedray.config import EngineConfig

__all__ = ["cache_size", "free_host_bytes", "host_pool_bytes", "num_staging"]

_MAX_HOST_POOL_BYTES = 4 * 2**30
"""Maximum size of the pools on a CPU, unless an option sets it."""
_MAX_PINNED_BYTES = 64 * 2**30
"""Maximum size of a CPU pool of a GPU, unless an option sets it."""
_PINNED_PART = 4
"""The CPU pools of a node take 1 / `_PINNED_PART` of its available memory, all together."""
_MOST_CPU_BLOCKS = 4
"""Maximum number of CPU blocks for each GPU block, unless an option sets their number."""


def cache_size(
    config: EngineConfig,
    spec: AttentionSpec,
    *,
    free_bytes: Callable[[], int],
    num_neighbors: int,
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
        num_cpu_blocks = min(num_most, host_pool_bytes(config) // block_bytes(spec))
    size = CacheSize(
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        block_bytes=block_bytes(spec),
        limits=config.scheduler.limits(),
    )
    num_host_blocks = num_cpu_blocks + (num_blocks if spec.device.type == "cpu" else 0)
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
    num_blocks = memory // block_bytes(spec)
    num_blocks -= num_staging(config, spec, num_blocks)
    blocks_per_sequence = -(-config.max_model_len // config.cache.block_size)
    # Room for every row at its maximum length, and as much again for cached prefixes.
    num_blocks = min(num_blocks, 2 * config.max_num_seqs * blocks_per_sequence)
    if num_blocks < 2:
        raise DeviceError(
            f"Only {memory} bytes of {spec.device.type} memory are left for the KV cache, which "
            f"needs at least two blocks of {block_bytes(spec)} bytes; use a smaller model, more "
            "ranks, a lower --max-num-seqs or --max-num-batched-tokens, or a higher "
            "--memory-fraction."
        )
    return num_blocks


def _check_host_memory(rank_bytes: int, num_ranks: int) -> None:
    needed, limit = rank_bytes * num_ranks, host_memory_bytes()
    if needed > limit:
        raise DeviceError(
            f"The caches of {num_ranks} {'rank' if num_ranks == 1 else 'ranks'} need "
            f"{needed / 2**30:.1f} GiB of host memory, but there are only "
            f"{limit / 2**30:.1f} GiB; use a lower --num-blocks or --num-cpu-blocks."
        )
