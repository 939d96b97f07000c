"""The second tier of the prefix cache: blocks in the CPU pool, found by the same keys.

It keeps what is evicted from the device pool. A sequence that is swapped out may take any of its
blocks, the least recently used first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cluster.scheduling.block_pool import BlockPool
from pagedray.batch import BlockCopy

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Sequence

    from cluster.scheduling.prefix_cache import BlockKey
    from cluster.scheduling.swap_costs import TierPolicy

__all__ = ["BlockIndex", "CpuPrefixCache"]


class BlockIndex:
    """Maps the content of full blocks to blocks of a pool, one to one."""

    __slots__ = ("_block_of", "_incomplete", "_key_of", "num_evicted_blocks", "pool")

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._evict)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._incomplete: set[int] = set()
        """Blocks that are not found yet."""
        self.num_evicted_blocks = 0
        """Blocks whose place another one took."""

    def __len__(self) -> int:
        return len(self._block_of)

    def find_block(self, key: BlockKey) -> int | None:
        """Return the block with this key, or None."""
        block = self._block_of.get(key.digest)
        if block is None or block in self._incomplete:
            return None
        return block if self._key_of[block].token_bytes == key.token_bytes else None

    def block_being_copied(self, key: BlockKey) -> int | None:
        """Return the block with this key whose content has not arrived, or None."""
        block = self._block_of.get(key.digest)
        return block if block in self._incomplete else None

    def has_key(self, key: BlockKey) -> bool:
        """Return whether a block has this key, although it may not be found yet."""
        return key.digest in self._block_of

    def key_of(self, block: int) -> BlockKey | None:
        """Return the key of a block, or None if it has none."""
        return self._key_of.get(block)

    def touch_key(self, key: BlockKey) -> bool:
        """Make the block with this key the most recently used one; return False if none has it."""
        block = self._block_of.get(key.digest)
        if block is None:
            return False
        self.pool.touch(block)
        return True

    def add_block(self, key: BlockKey) -> int:
        """Allocate and return a block for a key that none has; `end_copy` must follow."""
        block = self.pool.allocate()
        self._block_of[key.digest] = block
        self._key_of[block] = key
        self._incomplete.add(block)
        self.pool.keep(block)
        self.pool.pin(block)
        self.pool.release(block)
        return block

    def end_copy(self, block: int) -> None:
        """Make a block available to look-ups, since its content has arrived."""
        self._incomplete.discard(block)
        self.pool.unpin(block)

    def fail_copy(self, block: int) -> None:
        """Make a block free whose content has not arrived."""
        if block in self._key_of:
            self._remove(block)
            self.pool.discard(block)
        self.pool.unpin(block)

    def forget_key(self, key: BlockKey) -> None:
        """Remove the block with this key, whose content is invalid."""
        block = self._block_of.get(key.digest)
        if block is not None:
            self._remove(block)
            self.pool.discard(block)

    def clear(self) -> None:
        """Free all blocks of the pool."""
        self.pool.clear()
        self._block_of.clear()
        self._key_of.clear()
        self._incomplete.clear()

    def retain_complete(self, damaged: Container[int]) -> list[int]:
        """Make every block free; return those whose content is kept, in order of their last use.

        They are those that were found, but for the `damaged` ones.
        """
        idle = self.pool.idle_blocks
        # Those that sequences or copies use are the most recently used ones.
        blocks = [*idle, *(block for block in self._key_of if block not in idle)]
        kept = [one for one in blocks if one not in self._incomplete and one not in damaged]
        key_of = {block: self._key_of[block] for block in kept}
        self.clear()
        self._key_of = key_of
        self._block_of = {key.digest: block for block, key in key_of.items()}
        self.pool.clear(idle=kept)
        return kept

    def _evict(self, block: int) -> None:
        self.num_evicted_blocks += 1
        self._remove(block)

    def _remove(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block).digest]
        self._incomplete.discard(block)


class CpuPrefixCache(BlockIndex):
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

    def __init__(self, num_blocks: int, *, worth: TierPolicy, max_saved: int) -> None:
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
        kept = self.retain_complete(frozenset(damaged))
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
