"""Blocks outside the device that are found by the keys of their content.

A block gets its content by a copy, and is found once every rank has made it.

Only proven blocks are kept, and no key leaves the process that computed it, so that tenants
are as isolated here as in `prefix_cache`.
"""

from collections.abc import Container

from cluster.scheduling.blocks.block_pool import BlockPool
from cluster.scheduling.blocks.prefix_cache import BlockKey

__all__ = ["KeyedBlocks"]


class KeyedBlocks:
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

    def keep_whole(self, damaged: Container[int]) -> list[int]:
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
