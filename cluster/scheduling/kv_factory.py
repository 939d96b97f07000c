"""Makes the KV manager with the tiers of the prefix cache that the options enable."""

import secrets
from dataclasses import dataclass

from cluster.scheduling.blocks.cpu_prefix_cache import CpuPrefixCache
from cluster.scheduling.blocks.disk_prefix_cache import DiskPrefixCache
from cluster.scheduling.blocks.prefix_cache import PrefixCache
from cluster.scheduling.costs.copy_worth import CopyWorth
from cluster.scheduling.costs.swap_costs import SwapCosts
from cluster.scheduling.kv_manager import KvManager
from pagedray.config import SchedulerConfig

__all__ = ["KvOptions", "make_kv_manager"]

_SAVED_TOKENS = 4
"""Evicted tokens that a step copies to the CPU pool at most, for each that it may compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """The pools of blocks, and the tiers of the prefix cache in them."""

    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Number of blocks on the device."""
    num_cpu_blocks: int
    """Number of blocks in CPU memory."""
    num_disk_blocks: int = 0
    """Number of blocks on a disk."""
    enable_prefix_cache: bool = True
    enable_cpu_prefix_cache: bool = True
    hash_key: bytes | None = None
    """The key of the digests of blocks; None is a random one."""


def make_kv_manager(
    config: SchedulerConfig,
    swap_costs: SwapCosts,
    options: KvOptions,
) -> KvManager:
    """Return a manager of empty pools.

    A tier needs the one above it: without a prefix cache there is none in the CPU pool, and without
    that one none on a disk.
    """
    hash_key = options.hash_key or secrets.token_bytes(32)
    block_size, num_cpu_blocks = options.block_size, options.num_cpu_blocks
    cpu_cache = disk_cache = None
    if options.enable_prefix_cache and options.enable_cpu_prefix_cache and num_cpu_blocks:
        costs = None if config.preemption == "swap" else swap_costs
        num_tokens = _SAVED_TOKENS * config.limits().max_num_batched_tokens
        cpu_cache = CpuPrefixCache(
            num_cpu_blocks,
            worth=CopyWorth(costs, num_blocks=num_cpu_blocks, block_size=block_size),
            max_saved=-(-num_tokens // block_size),
        )
        if options.num_disk_blocks:
            disk_cache = DiskPrefixCache(options.num_disk_blocks, cpu_cache)
    return KvManager(
        block_size=block_size,
        num_blocks=options.num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        prefix_cache=PrefixCache(
            hash_key, num_blocks=options.num_blocks, is_enabled=options.enable_prefix_cache
        ),
        cpu_cache=cpu_cache,
        disk_cache=disk_cache,
    )
