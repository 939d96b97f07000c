"""Remembers why sequences got no blocks, so that no step looks for their prefixes in vain."""

from cluster.scheduling.blocks.block_pool import BlockPool
from cluster.scheduling.blocks.prefix_cache import PrefixCache
from cluster.scheduling.prefix_finder import PrefixFinder
from cluster.scheduling.sequence import Refusal, Sequence

__all__ = ["Refusals"]


class Refusals:
    """Says in O(1) whether a sequence that found too few free blocks still does."""

    __slots__ = ("_cache", "_finder")

    def __init__(self, cache: PrefixCache, finder: PrefixFinder) -> None:
        self._cache = cache
        self._finder = finder

    def note_refusal(
        self, sequence: Sequence, pool: BlockPool, *, num_hits: int, num_shared: int
    ) -> None:
        """Note that a sequence has no room, with `num_hits` cached blocks on the device."""
        is_all = num_hits == self._finder.num_shareable(sequence)
        sequence.refusal = Refusal(
            None if is_all else sequence.keys[num_hits],
            num_shared,
            pool.num_revived + self._cache.num_forgotten,
            self._cache.revision,
        )

    def is_still_refused(self, sequence: Sequence, pool: BlockPool, *, num_needed: int) -> bool:
        """Return whether there is certainly no room yet.

        Among the cached blocks of a sequence, one more is in use only after an idle one was
        shared, one was forgotten and computed again, or the first missing one was computed.
        """
        refusal, cache = sequence.refusal, self._cache
        if refusal is None or refusal.revision != cache.revision:
            return False
        if refusal.next_key is not None and cache.find_block(refusal.next_key) is not None:
            return False
        num_changes = pool.num_revived + cache.num_forgotten - refusal.num_changes
        return num_needed - refusal.num_shared - num_changes > pool.num_free
