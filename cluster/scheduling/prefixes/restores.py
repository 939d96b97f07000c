"""Copies cached blocks of the CPU pool back to the device, where sequences share them."""

from collections.abc import Iterable

from cluster.scheduling.blocks.block_pool import BlockPool
from cluster.scheduling.blocks.cpu_prefix_cache import CpuPrefixCache
from cluster.scheduling.blocks.prefix_cache import PrefixCache
from cluster.scheduling.prefixes.prefix_finder import PrefixFinder
from cluster.scheduling.sequence import Sequence
from pagedray.batch import BlockCopy

__all__ = ["Restores"]


class Restores:
    """The blocks that are being copied back."""

    __slots__ = ("_arriving", "_cache", "_copies", "_cpu_cache", "_finder", "_pool")

    def __init__(
        self,
        cache: PrefixCache,
        finder: PrefixFinder,
        pool: BlockPool,
        cpu_cache: CpuPrefixCache | None,
    ) -> None:
        """`pool` is the device pool. Without a `cpu_cache`, there is nothing to copy back."""
        self._cache = cache
        self._finder = finder
        self._pool = pool
        self._cpu_cache = cpu_cache
        self._copies: list[BlockCopy] = []
        """The copies of the plan that is being made."""
        self._arriving: set[int] = set()
        """Blocks of the device pool that they and the plans in flight write."""

    @property
    def num_planned(self) -> int:
        """Blocks that the plan being made copies back."""
        return len(self._copies)

    def restore_blocks(self, sequence: Sequence, first: int) -> list[int]:
        """Copy cached blocks from index `first` on back to the device; return their new blocks.

        The caller keeps room for them. They are pinned in both pools until it unpins them, once
        every rank has made the copies.
        """
        if self._cpu_cache is None:
            return []
        sources = self._finder.find_cpu_blocks(sequence, first)
        cpu_pool = self._cpu_cache.pool
        # Places for them may be those of blocks that are copied to the CPU pool.
        for source in sources:
            cpu_pool.share(source)
            cpu_pool.pin(source)
            cpu_pool.release(source)
        targets = [self._pool.allocate() for _ in sources]
        for key, source, target in zip(
            sequence.blocks.keys[first:], sources, targets, strict=False
        ):
            self._cache.add_block(key, target)
            self._pool.keep(target)
            self._pool.pin(target)
            self._copies.append(BlockCopy(source, target))
        if targets:
            self._cache.prove_blocks(targets)
            sequence.blocks.awaits_copies = True
            self._arriving.update(targets)
            self._cpu_cache.note_restored(sources)
        return targets

    def are_arriving(self, blocks: Iterable[int]) -> bool:
        """Return whether any of `blocks` is still being copied back."""
        return not self._arriving.isdisjoint(blocks)

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies for the plan that is being made."""
        copies, self._copies = self._copies, []
        return copies

    def note_arrived(self, blocks: Iterable[int]) -> None:
        """Record that every rank has made its copies to `blocks`, which may include others."""
        self._arriving.difference_update(blocks)

    def clear(self) -> None:
        """Forget all copies, as after the ranks were replaced."""
        self._copies.clear()
        self._arriving.clear()
