"""Remembers why sequences got no blocks, so that their prefixes are not looked up needlessly."""

from cluster.scheduling.blocks.block_pool import BlockPool
from cluster.scheduling.blocks.prefix_cache import PrefixCache
from cluster.scheduling.blocks.sequence_blocks import Shortage
from cluster.scheduling.prefixes.prefix_finder import PrefixFinder
from cluster.scheduling.sequence import Sequence

__all__ = ["Shortages"]


class Shortages:
    """Says in O(1) whether a sequence that found too few free blocks still does."""

    __slots__ = ("_cache", "_finder", "_pool")

    def __init__(self, cache: PrefixCache, finder: PrefixFinder, pool: BlockPool) -> None:
        """`pool` is the device pool."""
        self._cache = cache
        self._finder = finder
        self._pool = pool

    def note_shortage(self, sequence: Sequence, *, num_hits: int, num_shared: int) -> None:
        """Note that a sequence has no room, with `num_hits` cached blocks on the device."""
        is_all = num_hits == self._finder.num_shareable(sequence)
        sequence.blocks.shortage = Shortage(
            None if is_all else sequence.blocks.keys[num_hits],
            num_shared,
            self._pool.num_revived + self._cache.num_forgotten,
            self._cache.revision,
        )

    def is_still_short(self, sequence: Sequence, *, num_needed: int) -> bool:
        """Return whether there is certainly no room yet, in O(1).

        Among the cached blocks of a sequence, one more is in use only after an idle one was
        shared, one was forgotten and computed again, or the first missing one was computed.
        """
        shortage, cache, pool = sequence.blocks.shortage, self._cache, self._pool
        if shortage is None or shortage.revision != cache.revision:
            return False
        if shortage.next_key is not None and cache.find_block(shortage.next_key) is not None:
            return False
        num_changes = pool.num_revived + cache.num_forgotten - shortage.num_changes
        return num_needed - shortage.num_shared - num_changes > pool.num_free
