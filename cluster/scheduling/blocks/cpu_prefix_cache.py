"""The second tier of the prefix cache: blocks in the CPU pool, found by the same keys.

It keeps what is evicted from the device pool. A sequence that is swapped out may take any of its
blocks, the least recently used first.
"""

from collections import deque
from collections.abc import Collection, Sequence

from cluster.scheduling.blocks.keyed_blocks import KeyedBlocks
from cluster.scheduling.blocks.prefix_cache import BlockKey
from cluster.scheduling.costs.copy_worth import CopyWorth
from pagedray.batch import BlockCopy

__all__ = ["CpuPrefixCache"]


class CpuPrefixCache(KeyedBlocks):
    """Saves evicted blocks in the CPU pool."""

    __slots__ = (
        "_copies",
        "_in_flight",
        "_kept",
        "_max_saved",
        "num_damaged_blocks",
        "num_kept_blocks",
        "num_kept_hit_blocks",
        "num_restored_blocks",
        "num_saved_blocks",
        "worth",
    )

    def __init__(self, num_blocks: int, *, worth: CopyWorth, max_saved: int) -> None:
        """A plan saves at most `max_saved` blocks, so that it does not take too long."""
        super().__init__(num_blocks)
        self._max_saved = max_saved
        self.worth = worth
        """Decides which copies are worth their time."""
        self._copies: list[BlockCopy] = []
        """The copies of the plan that is being made."""
        self._in_flight: deque[tuple[int, list[int]]] = deque()
        """Steps that are not acknowledged, and the blocks that they save."""
        self._kept: set[int] = set()
        """Blocks that outlived a rank."""
        self.num_saved_blocks = 0
        self.num_restored_blocks = 0
        self.num_kept_blocks = 0
        """Blocks that outlived a rank, each time."""
        self.num_kept_hit_blocks = 0
        """The number of restored blocks that had outlived a rank."""
        self.num_damaged_blocks = 0
        """Blocks that were not as they were written when a rank was replaced."""

    def save_block(self, key: BlockKey, device_block: int) -> None:
        """Copy an evicted block in the plan that is being made, if that is worth it."""
        if self.touch_key(key) or not self.worth.is_saved(key.digest):
            return
        if not self.pool.num_free or len(self._copies) >= self._max_saved:
            self.worth.note_lost(key.digest)
            return
        self._copies.append(BlockCopy(device_block, self.add_block(key)))
        self.num_saved_blocks += 1

    def take_copies(self, step: int) -> list[BlockCopy]:
        """Return the copies for the plan of `step`."""
        copies, self._copies = self._copies, []
        if copies:
            self._in_flight.append((step, [copy.target for copy in copies]))
        return copies

    def acknowledge(self, step: int) -> None:
        """Make blocks available that were saved up to `step`, which every rank has finished."""
        while self._in_flight and self._in_flight[0][0] <= step:
            for block in self._in_flight.popleft()[1]:
                self.end_copy(block)

    def note_restored(self, blocks: Sequence[int]) -> None:
        """Count blocks that are copied back."""
        self.num_restored_blocks += len(blocks)
        if self._kept:
            self.num_kept_hit_blocks += sum(block in self._kept for block in blocks)

    def begin_epoch(self, damaged: Collection[int] | None) -> None:
        """Keep the blocks that were complete before ranks were replaced, except `damaged` ones.

        None if the pool of some rank is new, so that nothing is left.
        """
        if damaged is None:
            self.clear()
            return
        whole = self._key_of.keys() - self._incomplete
        self.num_damaged_blocks += len(whole.intersection(damaged))
        kept = self.keep_whole(frozenset(damaged))
        self._kept.update(kept)
        self.num_kept_blocks += len(kept)

    def clear(self) -> None:
        """Free all blocks of the pool."""
        super().clear()
        self._copies.clear()
        self._in_flight.clear()
        self._kept.clear()
        self.worth.clear()

    def _remove(self, block: int) -> None:
        super()._remove(block)
        self._kept.discard(block)
