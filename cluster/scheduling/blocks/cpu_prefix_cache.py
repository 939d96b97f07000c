"""The second tier of the prefix cache: blocks in the CPU pool, found by the same keys.

It keeps what is evicted from the device pool. A sequence that is swapped out may take any of its
blocks, the least recently used first.
"""

from collections import deque

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
        "_max_saved",
        "num_restored_blocks",
        "num_saved_blocks",
        "worth",
    )

    def __init__(self, num_blocks: int, *, worth: CopyWorth, max_saved: int) -> None:
        """A plan saves at most `max_saved` blocks, so that it does not take too long."""
        super().__init__(num_blocks)
        self._max_saved = max_saved
        self.worth = worth
        """Which copies save time."""
        self._copies: list[BlockCopy] = []
        """Of the plan that is being made."""
        self._in_flight: deque[tuple[int, list[int]]] = deque()
        """Steps that are not acknowledged, and the blocks that they save."""
        self.num_saved_blocks = 0
        self.num_restored_blocks = 0

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
        """Have the blocks found that were saved up to `step`, which every rank has finished."""
        while self._in_flight and self._in_flight[0][0] <= step:
            for block in self._in_flight.popleft()[1]:
                self.end_copy(block)

    def clear(self) -> None:
        """Make the pool empty."""
        super().clear()
        self._copies.clear()
        self._in_flight.clear()
        self.worth.clear()
