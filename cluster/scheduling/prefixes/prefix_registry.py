"""Registers the full blocks of sequences with the prefix cache, and says which are proven.

Others may share a block from when it is registered, although the plan that fills it is not done.
"""

from collections.abc import Sequence as AnySequence

from cluster.scheduling.blocks.block_pool import BlockPool
from cluster.scheduling.blocks.keyed_blocks import KeyedBlocks
from cluster.scheduling.blocks.prefix_cache import PrefixCache
from cluster.scheduling.prefixes.prefix_finder import PrefixFinder
from cluster.scheduling.sequence import Sequence

__all__ = ["PrefixRegistry"]

_MAX_UNPROVEN = 8
"""Registered blocks of a running sequence that need not be proven yet, which costs time."""


class PrefixRegistry:
    """Changes what the prefix cache has of sequences."""

    __slots__ = ("_block_size", "_cache", "_finder", "_lower_tiers", "_pool")

    def __init__(
        self,
        cache: PrefixCache,
        finder: PrefixFinder,
        pool: BlockPool,
        *,
        block_size: int,
        lower_tiers: AnySequence[KeyedBlocks],
    ) -> None:
        """`pool` is the device pool; `lower_tiers` keep what it evicts."""
        self._cache = cache
        self._finder = finder
        self._pool = pool
        self._block_size = block_size
        self._lower_tiers = lower_tiers

    def register_blocks(self, sequence: Sequence) -> None:
        """Add blocks that are full of known, computed tokens to the prefix cache."""
        cache = self._cache
        if not cache.is_enabled:
            return
        num_tokens = len(sequence.token_ids)
        if num_tokens > sequence.num_computed:
            num_tokens = sequence.num_computed
        blocks = sequence.blocks
        num_full, index = num_tokens // self._block_size, blocks.num_registered
        while index < num_full:
            block = blocks.ids[index]
            if cache.add_block(self._finder.key_at(sequence, index), block):
                self._pool.keep(block)
                if index < blocks.num_proven:
                    cache.prove_blocks((block,))
            index += 1
        self.note_registered(sequence, index)

    def note_registered(self, sequence: Sequence, num_blocks: int) -> None:
        """Record that the prefix cache has the first blocks of a sequence, and no others."""
        sequence.blocks.num_registered = num_blocks
        if not self._cache.is_enabled:
            sequence.next_check = sequence.max_length
        elif num_blocks - sequence.blocks.num_proven > _MAX_UNPROVEN:
            # The next token proves some.
            sequence.next_check = 0
        else:
            next_full, max_length = (num_blocks + 1) * self._block_size, sequence.max_length
            sequence.next_check = next_full if next_full < max_length else max_length

    def take_back(self, sequence: Sequence) -> None:
        """Mark the last known token as not computed, so that a later plan computes it again.

        Its block must not have been shared since it was computed, and is not shared until then.
        """
        sequence.num_computed -= 1
        blocks, index = sequence.blocks, sequence.num_computed // self._block_size
        if index >= blocks.num_registered:
            return
        block = blocks.ids[index]
        if self._cache.find_block(blocks.keys[index]) == block:
            self._cache.forget_block(block)
            self._pool.discard(block)
        self.note_registered(sequence, index)

    def prove_blocks(self, sequence: Sequence) -> None:
        """Record that the logits that gave a sequence its last token were finite."""
        blocks = sequence.blocks
        if blocks.num_proven >= blocks.num_registered:
            return
        num_full = (len(sequence.token_ids) - 1) // self._block_size
        proven = blocks.ids[blocks.num_proven : min(num_full, blocks.num_registered)]
        self._cache.prove_blocks(proven)
        blocks.num_proven += len(proven)

    def forget_blocks(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from the prefix cache, because its logits were not finite.

        It may have lost them already, so they are found by their keys. Nor is anything found that
        another sequence computed on top of those that are not proven.
        """
        keys, first = sequence.blocks.keys, sequence.blocks.num_proven
        for key in keys:
            for tier in self._lower_tiers:
                tier.forget_key(key)
            block = self._cache.find_block(key)
            if block is not None:
                self._cache.forget_block(block)
                self._pool.discard(block)
        if first < len(keys):
            self._cache.renew_key(self._finder.parent(sequence, first), keys[first])
