"""The blocks of sequences: block tables, forks and swaps.

Methods that allocate blocks allocate all that they need or none. The scheduler decides when a
sequence runs or is preempted; `prefixes` finds and registers its blocks in the prefix cache.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.block_pool import BlockPool
from cluster.scheduling.cpu_prefix_cache import CpuPrefixCache
from cluster.scheduling.disk_prefix_cache import DiskPrefixCache
from cluster.scheduling.prefix_cache import PrefixCache
from cluster.scheduling.prefix_finder import (
    FailedAdmissions,
    HostLoads,
    PrefixFinder,
    PrefixRegistry,
)
from cluster.scheduling.swap_costs import TierPolicy
from pagedray.batch import BlockCopy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from cluster.scheduling.sequence import Sequence
    from cluster.scheduling.swap_costs import SwapCosts
    from pagedray.config import SchedulerConfig

__all__ = ["CopiesInFlight", "KvManager", "KvOptions", "cache_counts", "make_kv_manager"]

_SAVED_TOKENS = 4
"""Evicted tokens that a step copies to the CPU pool at most, for each that it may compute."""


class KvManager:
    """Owns both pools and the prefix cache."""

    __slots__ = (
        "_failures",
        "_swaps",
        "block_size",
        "cpu_cache",
        "cpu_pool",
        "disk_cache",
        "finder",
        "num_hit_tokens",
        "num_queried_tokens",
        "pool",
        "prefix_cache",
        "registry",
        "restores",
    )

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        num_cpu_blocks: int,
        prefix_cache: PrefixCache,
        cpu_cache: CpuPrefixCache | None,
        disk_cache: DiskPrefixCache | None = None,
    ) -> None:
        """With a `cpu_cache`, its pool is the CPU pool; the prefix cache must be enabled.

        The `disk_cache` has what the CPU pool evicts.
        """
        assert cpu_cache is None or prefix_cache.is_enabled
        assert disk_cache is None or cpu_cache is not None
        self.block_size = block_size
        """Tokens per block."""
        self.prefix_cache = prefix_cache
        self.cpu_cache = cpu_cache
        """None if evicted blocks are not kept."""
        self.disk_cache = disk_cache
        self.pool = BlockPool(num_blocks, on_evict=self._evict_block)
        if cpu_cache is None:
            self.cpu_pool = BlockPool(num_cpu_blocks, on_evict=None)
        else:
            self.cpu_pool = cpu_cache.pool
        self.finder = PrefixFinder(prefix_cache, cpu_cache, block_size=block_size)
        """Looks up the leading blocks of sequences, in every tier."""
        self.registry = PrefixRegistry(
            prefix_cache,
            self.finder,
            self.pool,
            block_size=block_size,
            lower_tiers=[tier for tier in (cpu_cache, disk_cache) if tier is not None],
        )
        """Adds full blocks of sequences to the prefix cache, and removes them from all tiers."""
        self.restores = HostLoads(prefix_cache, self.finder, self.pool, cpu_cache)
        """The copies back from the CPU pool that are planned or under way."""
        self._failures = FailedAdmissions(prefix_cache, self.finder, self.pool)
        self._swaps = CopiesInFlight()
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def clear(self, damaged: Collection[int] | None = None) -> None:
        """Make every block free; the caller clears each sequence with `disown`.

        The CPU pool keeps its complete blocks except the `damaged` ones, or none if `damaged` is
        None; all other pools become empty.
        """
        self._swaps.clear()
        self.restores.clear()
        self.prefix_cache.clear()
        self.pool.clear()
        if self.cpu_cache is None:
            self.cpu_pool.clear()
        else:
            self.cpu_cache.begin_epoch(damaged)
        if self.disk_cache is not None:
            self.disk_cache.clear()

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def awaits_disk(self, sequence: Sequence, step: int) -> bool:
        """Return whether a sequence should wait for blocks on the disk before it starts.

        The plan of `step` reads them. A sequence waits for the disk only once, even if its blocks
        are lost meanwhile, so that it starts eventually.
        """
        if self.disk_cache is None:
            return False
        blocks = sequence.blocks
        if blocks.disk_step is None:
            keys, blocks.disk_step = self.finder.find_disk_keys(sequence, self.disk_cache)
            if keys:
                self.disk_cache.read_blocks(keys, step)
                blocks.disk_step = step
        return blocks.disk_step > self.disk_cache.read_step

    def admit(self, sequence: Sequence, *, num_tokens: int, num_spare: int) -> bool:
        """Give a sequence blocks for `num_tokens`, cached ones first; return False without room.

        At least `num_spare` blocks stay free. `num_computed` becomes the number of cached tokens;
        at least one known token is always left to compute. If `awaits_copies`, the sequence must
        not run before the step is acknowledged whose plan has the copies of `take_copies`.
        """
        num_needed = self.blocks_for(num_tokens) + num_spare
        if self._failures.still_fails(sequence, num_needed=num_needed):
            return False
        hits = self.finder.find_blocks(sequence)
        num_shared = sum(not self.pool.is_idle(block) for block in hits)
        if num_needed - num_shared > self.pool.num_free:
            self._failures.note_failure(sequence, num_hits=len(hits), num_shared=num_shared)
            return False
        for block in hits:
            self.pool.share(block)
        blocks = sequence.blocks
        blocks.awaits_copies = self.restores.are_arriving(hits)
        restored = self.restores.restore_blocks(sequence, len(hits))
        num_missing = self.blocks_for(num_tokens) - len(hits) - len(restored)
        blocks.ids = array("i", hits + restored)
        blocks.num_slots = len(blocks.ids) * self.block_size
        blocks.reserved_ids = [self.pool.allocate() for _ in range(num_missing)]
        blocks.num_verified = self.prefix_cache.num_verified(blocks.ids)
        sequence.num_computed = blocks.num_slots
        if self.prefix_cache.is_enabled:
            self.num_queried_tokens += len(sequence.token_ids)
            self.num_hit_tokens += blocks.num_slots
        self.registry.note_registered(sequence, len(blocks.ids))
        return True

    def fork(
        self, sequence: Sequence, donor: Sequence, *, num_tokens: int, num_spare: int
    ) -> list[BlockCopy] | None:
        """Share a sibling's prompt with a sequence, or return None without room.

        The last prompt token is left to compute. Its block is written and hence a copy, unless
        that token is the first in it.
        """
        last_position = sequence.num_prompt_tokens - 1
        num_shared = last_position // self.block_size
        num_missing = self.blocks_for(num_tokens) - num_shared
        if num_missing + num_spare > self.pool.num_free:
            return None
        shared = donor.blocks.ids[:num_shared]
        self.pool.share_owned(shared)
        blocks = sequence.blocks
        blocks.reserved_ids = [self.pool.allocate() for _ in range(num_missing)]
        target = blocks.reserved_ids.pop()
        blocks.ids = shared
        blocks.ids.append(target)
        blocks.num_slots = len(blocks.ids) * self.block_size
        blocks.keys = donor.blocks.keys[:num_shared]
        blocks.keys_revision = donor.blocks.keys_revision
        blocks.num_verified = min(donor.blocks.num_verified, num_shared)
        sequence.num_computed = last_position
        self.registry.note_registered(sequence, num_shared)
        if last_position % self.block_size == 0:
            return []
        return [BlockCopy(donor.blocks.ids[num_shared], target)]

    def append(self, sequence: Sequence) -> int | None:
        """Add a block to a table and return it, or None if none is free."""
        blocks = sequence.blocks
        if blocks.reserved_ids:
            block = blocks.reserved_ids.pop()
        elif self.pool.num_free:
            block = self.pool.allocate()
        else:
            return None
        blocks.ids.append(block)
        blocks.num_slots += self.block_size
        return block

    def extend(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Extend a table to `num_tokens` with reserved blocks, and return them."""
        blocks = sequence.blocks
        num_added = self.blocks_for(num_tokens) - len(blocks.ids)
        added = [blocks.reserved_ids.pop() for _ in range(num_added)]
        blocks.ids.extend(added)
        blocks.num_slots = len(blocks.ids) * self.block_size
        return added

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, in both pools."""
        # The end of a prefix is useless without its beginning, so it is evicted first.
        blocks = sequence.blocks
        self.pool.release_all(blocks.ids)
        for block in blocks.reserved_ids:
            self.pool.release(block)
        for block in blocks.cpu_ids:
            self.cpu_pool.release(block)
        self.disown(sequence)

    def disown(self, sequence: Sequence) -> None:
        """Clear a sequence's record of its blocks."""
        sequence.blocks.clear()
        sequence.unchecked_until = 0

    def num_shared(self, sequence: Sequence) -> int:
        """Return the leading blocks of a sequence that others own too, and that its keys find."""
        cache, blocks = self.prefix_cache, sequence.blocks
        if blocks.keys_revision != cache.revision:
            return 0
        for index, (key, block) in enumerate(zip(blocks.keys, blocks.ids, strict=False)):
            if not self.pool.is_shared(block) or cache.find_block(key) != block:
                return index
        return min(len(blocks.keys), len(blocks.ids))

    def keeps_released(self, sequence: Sequence) -> bool:
        """Return whether the CPU pool will keep the cached blocks of a sequence once evicted.

        Then there is no need to copy them before others need their place.
        """
        cpu_cache = self.cpu_cache
        if cpu_cache is None or not cpu_cache.worth.is_open:
            return False
        return self.cpu_pool.num_free - self.cpu_pool.num_idle >= len(sequence.blocks.ids)

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Return whether there is something to swap out, and the CPU pool has room for it."""
        num_blocks = len(sequence.blocks.ids) - self.num_shared(sequence)
        return 0 < num_blocks <= self.cpu_pool.num_free

    def swap_out(self, sequence: Sequence, step: int) -> list[BlockCopy]:
        """Move the blocks that others do not share to the CPU pool; return the copies for `step`.

        The others are looked up again when it is swapped in.
        """
        num_shared = self.num_shared(sequence)
        sources = sequence.blocks.ids[num_shared:].tolist()
        targets = [self.cpu_pool.allocate() for _ in sources]
        for source, target in zip(sources, targets, strict=True):
            self.pool.pin(source)
            self.cpu_pool.pin(target)
        self._swaps.add_blocks(step, sources, targets)
        self.release(sequence)
        sequence.blocks.num_unswapped = num_shared
        sequence.blocks.cpu_ids = targets
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]

    def swap_in(
        self, sequence: Sequence, step: int, *, num_tokens: int, num_spare: int
    ) -> list[BlockCopy] | None:
        """Move a sequence back with blocks for `num_tokens`, or return None without room.

        Blocks that are still cached are shared, and only the others copied; they are valid once
        `step` is acknowledged. If a block that was not swapped out is no longer cached, the
        sequence loses all others too and is to be recomputed.
        """
        num_blocks = self.blocks_for(num_tokens)
        num_needed = num_blocks + num_spare
        if self._failures.still_fails(sequence, num_needed=num_needed):
            return None
        found = self.finder.find_blocks(sequence)
        # It writes to no block of tokens that it has computed.
        hits = found[: sequence.num_computed // self.block_size]
        blocks = sequence.blocks
        if len(hits) < blocks.num_unswapped:
            self.release(sequence)
            return None
        num_shared = sum(not self.pool.is_idle(block) for block in hits)
        if num_needed - num_shared > self.pool.num_free:
            self._failures.note_failure(sequence, num_hits=len(found), num_shared=num_shared)
            return None
        for block in hits:
            self.pool.share(block)
        sources = blocks.cpu_ids[len(hits) - blocks.num_unswapped :]
        targets = [self.pool.allocate() for _ in sources]
        for source, target in zip(sources, targets, strict=True):
            self.cpu_pool.pin(source)
            self.pool.pin(target)
        self._swaps.add_blocks(step, targets, sources)
        self.release(sequence)
        blocks.ids = array("i", hits + targets)
        blocks.num_slots = len(blocks.ids) * self.block_size
        blocks.reserved_ids = [self.pool.allocate() for _ in range(num_blocks - len(blocks.ids))]
        num_verified = self.prefix_cache.num_verified(hits)
        if num_verified < len(hits):
            blocks.num_verified = min(blocks.num_verified, num_verified)
        self.registry.note_registered(sequence, len(hits))
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]

    def num_lacking(self, sequence: Sequence, *, num_tokens: int, num_spare: int) -> int:
        """Return the blocks that a waiting sequence lacks beyond those free or in transit."""
        num_needed = self.blocks_for(num_tokens) + num_spare
        failure = sequence.blocks.failure
        if failure is not None:
            num_needed -= failure.num_shared
        return num_needed - self.pool.num_free - self.pool.num_in_transit

    def num_owned_alone(self, sequence: Sequence) -> int:
        """Return the blocks of a running sequence that no other owns, in O(log n).

        An estimate: it holds if those behind the first such block are such blocks too.
        """
        blocks, is_shared = sequence.blocks, self.pool.is_shared
        num_shared = bisect_left(blocks.ids, True, key=lambda block: not is_shared(block))
        return len(blocks.ids) - num_shared + len(blocks.reserved_ids)

    def acknowledge(self, step: int) -> None:
        """Unpin the blocks of copies up to `step`, which every rank has finished."""
        for swap in self._swaps.take_ended(step):
            for block in reversed(swap.block_ids):
                self.pool.unpin(block)
            for block in swap.cpu_block_ids:
                self.cpu_pool.unpin(block)
            self.restores.note_arrived(swap.block_ids)
        if self.cpu_cache is not None:
            self.cpu_cache.acknowledge(step)

    def take_copies(self, step: int) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Return the copies of cached blocks to and from the CPU pool, for the plan of `step`."""
        evictions = [] if self.cpu_cache is None else self.cpu_cache.take_copies(step)
        restores = self.restores.take_copies()
        if restores:
            targets = [copy.target for copy in restores]
            self._swaps.add_blocks(step, targets, [copy.source for copy in restores])
        return evictions, restores

    def _evict_block(self, block: int) -> None:
        """Remove a block from the prefix cache; if it is verified, the CPU pool may keep it."""
        if self.cpu_cache is not None and self.prefix_cache.is_verified(block):
            key = self.prefix_cache.key_of(block)
            assert key is not None
            self.cpu_cache.save_block(key, block)
        self.prefix_cache.forget_block(block)


def cache_counts(kv: KvManager) -> dict[str, int]:
    """Return the fields of `SchedulerStats` that count blocks and cached tokens, by name."""
    pool, cpu_pool = kv.pool, kv.cpu_pool
    counts = {
        "num_blocks": pool.num_blocks,
        "num_free_blocks": pool.num_free,
        "num_cached_blocks": pool.num_idle,
        "num_transit_blocks": pool.num_in_transit,
        "num_cpu_blocks": cpu_pool.num_blocks,
        "num_free_cpu_blocks": cpu_pool.num_free,
        "num_cached_cpu_blocks": cpu_pool.num_idle,
        "num_transit_cpu_blocks": cpu_pool.num_in_transit,
        "num_queried_tokens": kv.num_queried_tokens,
        "num_hit_tokens": kv.num_hit_tokens,
    }
    if (cpu_cache := kv.cpu_cache) is not None:
        counts |= {
            "num_saved_blocks": cpu_cache.num_saved_blocks,
            "num_restored_blocks": cpu_cache.num_restored_blocks,
            "num_cpu_hit_tokens": cpu_cache.num_restored_blocks * kv.block_size,
            "num_kept_cpu_blocks": cpu_cache.num_kept_blocks,
            "num_kept_hit_tokens": cpu_cache.num_kept_hit_blocks * kv.block_size,
            "num_damaged_cpu_blocks": cpu_cache.num_damaged_blocks,
        }
    if (disk_cache := kv.disk_cache) is not None:
        counts |= {
            "num_disk_blocks": disk_cache.pool.num_blocks,
            "num_cached_disk_blocks": disk_cache.pool.num_idle,
            "num_disk_hit_tokens": disk_cache.num_read_blocks * kv.block_size,
            "num_written_blocks": disk_cache.num_written_blocks,
            "num_read_blocks": disk_cache.num_read_blocks,
            "num_failed_writes": disk_cache.num_failed_writes,
            "num_failed_reads": disk_cache.num_failed_reads,
        }
    return counts


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
            worth=TierPolicy(costs, num_blocks=num_cpu_blocks, block_size=block_size),
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


class CopiedBlocks(NamedTuple):
    """The blocks of both pools that the plan of a step copies, whose direction does not matter."""

    step: int
    block_ids: list[int]
    cpu_block_ids: list[int]


class CopiesInFlight:
    """Copied blocks in the order of their steps."""

    __slots__ = ("_copied",)

    def __init__(self) -> None:
        self._copied: deque[CopiedBlocks] = deque()

    def add_blocks(self, step: int, block_ids: list[int], cpu_block_ids: list[int]) -> None:
        """Add the pinned blocks of copies in the plan of `step`."""
        self._copied.append(CopiedBlocks(step, block_ids, cpu_block_ids))

    def take_ended(self, step: int) -> Iterator[CopiedBlocks]:
        """Yield and forget the blocks of copies up to `step`."""
        while self._copied and self._copied[0].step <= step:
            yield self._copied.popleft()

    def clear(self) -> None:
        """Forget all copies, as after the ranks were replaced."""
        self._copied.clear()
