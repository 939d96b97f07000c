"""The second tier of the prefix cache: blocks in the CPU pool, found by the same keys.

It keeps what is evicted from the device pool. A sequence that is swapped out may take any of its
blocks, the least recently used first. A block is found once every rank has copied it.

Only proven blocks are kept, and no key leaves the process that computed it, so that tenants
are as isolated here as in `prefix_cache`.
"""

from collections import deque

from cluster.scheduling.blocks.block_pool import BlockPool
from cluster.scheduling.blocks.prefix_cache import BlockKey
from cluster.scheduling.costs.copy_worth import CopyWorth
from pagedray.batch import BlockCopy

__all__ = ["CpuPrefixCache"]


class CpuPrefixCache:
    """Maps the content of full blocks to blocks of the CPU pool, one to one."""

    __slots__ = (
        "_block_of",
        "_copies",
        "_in_flight",
        "_key_of",
        "_max_saved",
        "_unsaved",
        "num_evicted_blocks",
        "num_restored_blocks",
        "num_saved_blocks",
        "pool",
        "worth",
    )

    def __init__(self, num_blocks: int, *, worth: CopyWorth, max_saved: int) -> None:
        """A plan saves at most `max_saved` blocks, so that it does not take too long."""
        self._max_saved = max_saved
        self.worth = worth
        """Which copies save time."""
        self.pool = BlockPool(num_blocks, on_evict=self._forget_block)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._copies: list[BlockCopy] = []
        """Of the plan that is being made."""
        self._in_flight: deque[tuple[int, list[int]]] = deque()
        """Steps that are not acknowledged, and the blocks that they save."""
        self._unsaved: set[int] = set()
        """Blocks that are not found yet."""
        self.num_saved_blocks = 0
        self.num_restored_blocks = 0
        self.num_evicted_blocks = 0
        """Blocks whose place another one took, in the CPU pool."""

    def __len__(self) -> int:
        return len(self._block_of)

    def find_block(self, key: BlockKey) -> int | None:
        """Return the CPU block with this key, or None."""
        block = self._block_of.get(key.digest)
        if block is None or block in self._unsaved:
            return None
        return block if self._key_of[block].token_bytes == key.token_bytes else None

    def save_block(self, key: BlockKey, device_block: int) -> None:
        """Copy an evicted block in the plan that is being made, if that is worth it."""
        block = self._block_of.get(key.digest)
        if block is not None:
            self.pool.touch(block)
            return
        if not self.worth.is_saved(key.digest):
            return
        if not self.pool.num_free or len(self._copies) >= self._max_saved:
            self.worth.note_lost(key.digest)
            return
        block = self.pool.allocate()
        self._block_of[key.digest] = block
        self._key_of[block] = key
        self._unsaved.add(block)
        self.pool.keep(block)
        self.pool.pin(block)
        self.pool.release(block)
        self._copies.append(BlockCopy(device_block, block))
        self.num_saved_blocks += 1

    def take_copies(self, step: int) -> list[BlockCopy]:
        """Return the copies for the plan of `step`."""
        copies, self._copies = self._copies, []
        if copies:
            self._in_flight.append((step, [copy.target for copy in copies]))
        return copies

    def acknowledge(self, step: int) -> None:
        """Have the blocks found that were saved up to `step`, which every rank has finished."""
        while self._in_flight and self._in_flight[0][0] <= step:
            for block in self._in_flight.popleft()[1]:
                self._unsaved.discard(block)
                self.pool.unpin(block)

    def forget_key(self, key: BlockKey) -> None:
        """Remove the block with this key, whose content is invalid."""
        block = self._block_of.get(key.digest)
        if block is not None:
            self._remove(block)
            self.pool.discard(block)

    def clear(self) -> None:
        """Make the pool empty."""
        self.pool = BlockPool(self.pool.num_blocks, on_evict=self._forget_block)
        self._block_of.clear()
        self._key_of.clear()
        self._copies.clear()
        self._in_flight.clear()
        self._unsaved.clear()
        self.worth.clear()

    def _forget_block(self, block: int) -> None:
        self.num_evicted_blocks += 1
        self._remove(block)

    def _remove(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block).digest]
        self._unsaved.discard(block)
