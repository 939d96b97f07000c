"""Whether cached blocks are worth a copy to the CPU pool, and back.

Copying an evicted block takes time, and saves time once the block is found again, if copying it
back takes less than computing its tokens. How often that happens depends on the clients. It is
counted, also for blocks that were not copied, whose digests are remembered as long as the CPU pool
would have kept them.
"""

from collections import OrderedDict

from cluster.scheduling.costs.swap_costs import SwapCosts

__all__ = ["CopyWorth"]

_SAVED_ANYWAY = 64
"""One in this many blocks is copied even if it is not worth it, so that copies are measured."""

_FIRST_WEIGHT = 512
"""Blocks that count as evicted and found again before any was."""
_MOST_WEIGHT = 8192
"""Evicted blocks after which older ones count half."""


class CopyWorth:
    """Compares the time of copies with the time that they save."""

    __slots__ = (
        "_block_size",
        "_costs",
        "_lost",
        "_num_blocks",
        "_num_evicted",
        "_num_found",
        "_num_until_check",
        "is_open",
    )

    def __init__(self, costs: SwapCosts | None, *, num_blocks: int, block_size: int) -> None:
        """Without costs, every copy is worth it; the CPU pool has `num_blocks`."""
        self._costs = costs
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_evicted = self._num_found = float(_FIRST_WEIGHT)
        """Number of recently evicted blocks. At first, as many count as found as were evicted."""
        self._lost: OrderedDict[bytes, None] = OrderedDict()
        """Digests of blocks that were evicted and not copied."""
        self.is_open = True
        """Whether evicted blocks are copied."""
        self._num_until_check = _SAVED_ANYWAY

    def is_saved(self, digest: bytes) -> bool:
        """Return whether to copy an evicted block to the CPU pool."""
        if self._costs is None:
            return True
        self._num_evicted += 1.0
        self._num_until_check -= 1
        if not self._num_until_check:
            self._num_until_check = _SAVED_ANYWAY
            self._check(self._costs)
            return True
        if not self.is_open:
            self.note_lost(digest)
        return self.is_open

    def note_lost(self, digest: bytes) -> None:
        """Remember a block that was evicted and not copied."""
        self._lost[digest] = None
        if len(self._lost) > self._num_blocks:
            self._lost.popitem(last=False)

    def note_lookup(self, digest: bytes) -> bool:
        """Return whether a block that was looked up would have been found, had it been copied."""
        if digest not in self._lost:
            return False
        del self._lost[digest]
        self._num_found += 1.0
        return True

    def is_restored(self, num_blocks: int, *, first: int) -> bool:
        """Return whether to copy found blocks back rather than compute them, from `first` on."""
        if self._costs is not None and not self._costs.choose_restore(
            num_blocks=num_blocks,
            first_position=first * self._block_size,
            num_tokens=num_blocks * self._block_size,
        ):
            return False
        self._num_found += num_blocks
        return True

    def is_read(self, num_blocks: int, *, num_reading: int, first: int) -> bool:
        """Return whether to read blocks from the disk rather than compute them, from `first` on.

        They wait for `num_reading` others.
        """
        return self._costs is None or self._costs.choose_read(
            num_blocks=num_blocks,
            num_reading=num_reading,
            first_position=first * self._block_size,
            num_tokens=num_blocks * self._block_size,
        )

    def clear(self) -> None:
        """Forget what was lost: the blocks of new ranks are empty."""
        self._lost.clear()

    def _check(self, costs: SwapCosts) -> None:
        """Compare what recent evictions cost with what was saved."""
        self.is_open = costs.pays(
            num_copied=self._num_evicted, num_found=self._num_found, num_tokens=self._block_size
        )
        if self._num_evicted > _MOST_WEIGHT:
            self._num_evicted /= 2
            self._num_found /= 2
