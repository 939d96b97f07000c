"""Makes the KV manager with the tiers of the prefix cache that options ask for."""

import secrets

from cluster.scheduling.blocks.cpu_prefix_cache import CpuPrefixCache
from cluster.scheduling.blocks.disk_prefix_cache import DiskPrefixCache
from cluster.scheduling.blocks.prefix_cache import PrefixCache
from cluster.scheduling.costs.copy_worth import CopyWorth
from cluster.scheduling.costs.swap_costs import SwapCosts
from cluster.scheduling.kv_manager import KvManager
from pagedray.config import SchedulerConfig

__all__ = ["make_kv_manager"]

_SAVED_TOKENS = 4
"""Evicted tokens that a step copies to the CPU pool at most, for each that it may compute."""


def make_kv_manager(
    config: SchedulerConfig,
    swap_costs: SwapCosts,
    *,
    block_size: int,
    num_blocks: int,
    num_cpu_blocks: int,
    num_disk_blocks: int,
    enable_prefix_cache: bool,
    enable_cpu_prefix_cache: bool,
    hash_key: bytes | None,
) -> KvManager:
    """Return a manager of empty pools; without a `hash_key`, that of the prefix cache is random.

    A tier needs the one above it: without a prefix cache there is none in the CPU pool, and without
    that one none on a disk.
    """
    hash_key = secrets.token_bytes(32) if hash_key is None else hash_key
    cpu_cache = disk_cache = None
    if enable_prefix_cache and enable_cpu_prefix_cache and num_cpu_blocks:
        costs = None if config.preemption == "swap" else swap_costs
        num_tokens = _SAVED_TOKENS * config.max_num_batched_tokens
        cpu_cache = CpuPrefixCache(
            num_cpu_blocks,
            worth=CopyWorth(costs, num_blocks=num_cpu_blocks, block_size=block_size),
            max_saved=-(-num_tokens // block_size),
        )
        if num_disk_blocks:
            disk_cache = DiskPrefixCache(num_disk_blocks, cpu_cache)
    return KvManager(
        block_size=block_size,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        prefix_cache=PrefixCache(hash_key, num_blocks=num_blocks, is_enabled=enable_prefix_cache),
        cpu_cache=cpu_cache,
        disk_cache=disk_cache,
    )
