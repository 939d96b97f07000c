"""The blocks of sequences: block tables, prefix hits, forks and swaps.

Methods that allocate blocks allocate all that they need or none. When a sequence runs or is
preempted is the scheduler's concern.
"""

from bisect import bisect_left
from collections.abc import Collection
from typing import TYPE_CHECKING

from cluster.scheduling.blocks.block_pool import BlockPool
from cluster.scheduling.blocks.copies_in_flight import CopiesInFlight
from cluster.scheduling.blocks.cpu_prefix_cache import CpuPrefixCache
from cluster.scheduling.blocks.disk_prefix_cache import DiskPrefixCache
from cluster.scheduling.blocks.prefix_cache import PrefixCache, PromptKeys
from cluster.scheduling.prefix_finder import PrefixFinder
from cluster.scheduling.refusals import Refusals
from cluster.scheduling.sequence import Sequence
from pagedray.batch import BlockCopy
from pagedray.request import Request

if TYPE_CHECKING:
    from array import array

__all__ = ["KvManager"]

_MAX_UNPROVEN = 8
"""Registered blocks of a running sequence that need not be proven yet, which costs time."""


class KvManager:
    """Owns both pools and the prefix cache."""

    __slots__ = (
        "_arriving",
        "_finder",
        "_refusals",
        "_restores",
        "_swaps",
        "block_size",
        "cpu_cache",
        "cpu_pool",
        "disk_cache",
        "num_hit_tokens",
        "num_queried_tokens",
        "pool",
        "prefix_cache",
    )

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        num_cpu_blocks: int,
        prefix_cache: PrefixCache | None,
        cpu_cache: CpuPrefixCache | None,
        disk_cache: DiskPrefixCache | None = None,
    ) -> None:
        """With a `cpu_cache`, its pool is the CPU pool; it takes a prefix cache to have one.

        The `disk_cache` has what the CPU pool evicts.
        """
        assert cpu_cache is None or prefix_cache is not None
        assert disk_cache is None or cpu_cache is not None
        self.block_size = block_size
        """Tokens per block."""
        self._swaps = CopiesInFlight()
        self.prefix_cache = prefix_cache
        self.cpu_cache = cpu_cache
        """None if evicted blocks are not kept."""
        self.disk_cache = disk_cache
        self._finder: PrefixFinder | None = None
        self._refusals: Refusals | None = None
        if prefix_cache is not None:
            self._finder = PrefixFinder(prefix_cache, cpu_cache, block_size=block_size)
            self._refusals = Refusals(prefix_cache, self._finder)
        self.pool = BlockPool(num_blocks, on_evict=self._forget_block)
        if cpu_cache is None:
            self.cpu_pool = BlockPool(num_cpu_blocks, on_evict=None)
        else:
            self.cpu_pool = cpu_cache.pool
        self._restores: list[BlockCopy] = []
        """Cached blocks that the plan being made copies back."""
        self._arriving: set[int] = set()
        """Cached blocks that are being copied back."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def clear(self, damaged: Collection[int] | None = None) -> None:
        """Make every block free; the caller clears each sequence with `disown`.

        All become empty, except that the CPU pool keeps what was whole, but for its `damaged`
        blocks, unless these are None.
        """
        self._swaps.clear()
        self._restores.clear()
        self._arriving.clear()
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        self.pool.clear()
        if self.cpu_cache is None:
            self.cpu_pool.clear()
        else:
            self.cpu_cache.begin_epoch(damaged)
        if self.disk_cache is not None:
            self.disk_cache.clear()

    @property
    def num_restoring(self) -> int:
        """Cached blocks that the plan being made copies back."""
        return len(self._restores)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def hash_prompt(self, request: Request, prompt: "array[int]") -> PromptKeys | None:
        """Return the keys of a long prompt, which take milliseconds; None if it is short.

        May be called from any thread.
        """
        return None if self._finder is None else self._finder.hash_prompt(request, prompt)

    def awaits_disk(self, sequence: Sequence, step: int) -> bool:
        """Return whether a sequence that might start is better off to wait for blocks on the disk.

        The plan of `step` reads them. It does so once, whatever becomes of them meanwhile, so that
        it starts in the end.
        """
        if self.disk_cache is None or self._finder is None:
            return False
        if sequence.disk_step is None:
            keys, sequence.disk_step = self._finder.find_disk_keys(sequence, self.disk_cache)
            if keys:
                self.disk_cache.read_blocks(keys, step)
                sequence.disk_step = step
        return sequence.disk_step > self.disk_cache.read_step

    def admit(self, sequence: Sequence, *, num_tokens: int, num_spare: int) -> bool:
        """Give a sequence blocks for `num_tokens`, cached ones first; return False without room.

        At least `num_spare` blocks stay free. `num_computed` becomes the number of cached tokens;
        at least one known token is always left to compute. If `awaits_copies`, the sequence must
        not run before the step is acknowledged whose plan has the copies of `take_copies`.
        """
        num_needed = self.blocks_for(num_tokens) + num_spare
        if self._is_still_refused(sequence, num_needed):
            return False
        hits = self._find_cached(sequence)
        num_shared = sum(not self.pool.is_idle(block) for block in hits)
        if num_needed - num_shared > self.pool.num_free:
            self._refuse(sequence, num_hits=len(hits), num_shared=num_shared)
            return False
        for block in hits:
            self.pool.share(block)
        sequence.awaits_copies = not self._arriving.isdisjoint(hits)
        restored = self._restore(sequence, len(hits))
        num_missing = self.blocks_for(num_tokens) - len(hits) - len(restored)
        sequence.block_ids = hits + restored
        sequence.num_slots = len(sequence.block_ids) * self.block_size
        sequence.num_computed = sequence.num_slots
        sequence.reserved_block_ids = [self.pool.allocate() for _ in range(num_missing)]
        if self._finder is not None:
            sequence.num_proven = self._finder.num_proven(sequence.block_ids)
            self.num_queried_tokens += len(sequence.token_ids)
            self.num_hit_tokens += sequence.num_slots
        self._set_registered(sequence, len(sequence.block_ids))
        return True

    def fork(
        self, sequence: Sequence, donor: Sequence, *, num_tokens: int, num_spare: int
    ) -> list[BlockCopy] | None:
        """Share a sibling's prompt with a sequence, or return None without room.

        The last prompt token is left to compute. Its block is written and hence a copy, unless
        that token is the first in it.
        """
        last_position = sequence.num_prompt_tokens - 1
        num_shared = last_position // self.block_size
        num_missing = self.blocks_for(num_tokens) - num_shared
        if num_missing + num_spare > self.pool.num_free:
            return None
        shared = donor.block_ids[:num_shared]
        for block in shared:
            self.pool.share(block)
        sequence.reserved_block_ids = [self.pool.allocate() for _ in range(num_missing)]
        target = sequence.reserved_block_ids.pop()
        sequence.block_ids = [*shared, target]
        sequence.num_slots = len(sequence.block_ids) * self.block_size
        sequence.num_computed = last_position
        sequence.keys = donor.keys[:num_shared]
        sequence.keys_revision = donor.keys_revision
        sequence.num_proven = min(donor.num_proven, num_shared)
        self._set_registered(sequence, num_shared)
        if last_position % self.block_size == 0:
            return []
        return [BlockCopy(donor.block_ids[num_shared], target)]

    def append(self, sequence: Sequence) -> int | None:
        """Add a block to a table and return it, or None if none is free."""
        if sequence.reserved_block_ids:
            block = sequence.reserved_block_ids.pop()
        elif self.pool.num_free:
            block = self.pool.allocate()
        else:
            return None
        sequence.block_ids.append(block)
        sequence.num_slots += self.block_size
        return block

    def extend(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Extend a table to `num_tokens` with reserved blocks, and return them."""
        num_added = self.blocks_for(num_tokens) - len(sequence.block_ids)
        added = [sequence.reserved_block_ids.pop() for _ in range(num_added)]
        sequence.block_ids += added
        sequence.num_slots = len(sequence.block_ids) * self.block_size
        return added

    def register(self, sequence: Sequence) -> None:
        """Add blocks that are full of known, computed tokens to the prefix cache."""
        cache, finder = self.prefix_cache, self._finder
        if cache is None or finder is None:
            return
        num_tokens = len(sequence.token_ids)
        if num_tokens > sequence.num_computed:
            num_tokens = sequence.num_computed
        num_full, index = num_tokens // self.block_size, sequence.num_registered
        while index < num_full:
            block = sequence.block_ids[index]
            if cache.add_block(finder.key_at(sequence, index), block):
                self.pool.keep(block)
                if index < sequence.num_proven:
                    cache.prove_blocks((block,))
            index += 1
        self._set_registered(sequence, index)

    def take_back(self, sequence: Sequence) -> None:
        """Mark the last known token as not computed, so that a later plan computes it again.

        Its block must not have been shared since it was computed, and is not shared until then.
        """
        sequence.num_computed -= 1
        index = sequence.num_computed // self.block_size
        if self.prefix_cache is None or index >= sequence.num_registered:
            return
        block = sequence.block_ids[index]
        if self.prefix_cache.find_block(sequence.keys[index]) == block:
            self.prefix_cache.forget_block(block)
            self.pool.discard(block)
        self._set_registered(sequence, index)

    def prove(self, sequence: Sequence) -> None:
        """Record that the logits that gave a sequence its last token were finite."""
        if self.prefix_cache is None or sequence.num_proven >= sequence.num_registered:
            return
        num_full = (len(sequence.token_ids) - 1) // self.block_size
        num_proven = min(num_full, sequence.num_registered)
        blocks = sequence.block_ids[sequence.num_proven : num_proven]
        self.prefix_cache.prove_blocks(blocks)
        sequence.num_proven += len(blocks)

    def forget_blocks(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from the prefix cache, because its logits were not finite.

        It may have lost them already, so they are found by their keys. Nor is anything found that
        another sequence computed on top of those that are not proven.
        """
        if self.prefix_cache is None or self._finder is None:
            return
        keys, first = sequence.keys, sequence.num_proven
        for key in keys:
            if self.cpu_cache is not None:
                self.cpu_cache.forget_key(key)
            if self.disk_cache is not None:
                self.disk_cache.forget_key(key)
            block = self.prefix_cache.find_block(key)
            if block is not None:
                self.prefix_cache.forget_block(block)
                self.pool.discard(block)
        if first < len(keys):
            parent = self._finder.parent(sequence, first)
            self.prefix_cache.renew_key(parent, keys[first])

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, in both pools."""
        # The end of a prefix is useless without its beginning, so it is evicted first.
        for block in reversed(sequence.block_ids):
            self.pool.release(block)
        for block in sequence.reserved_block_ids:
            self.pool.release(block)
        for block in sequence.cpu_block_ids:
            self.cpu_pool.release(block)
        self.disown(sequence)

    def disown(self, sequence: Sequence) -> None:
        """Clear a sequence's record of its blocks."""
        sequence.block_ids = []
        sequence.num_slots = 0
        sequence.decode_end = 0
        sequence.reserved_block_ids = []
        sequence.cpu_block_ids = []
        sequence.num_left_behind = 0
        sequence.awaits_copies = False
        sequence.disk_step = None
        sequence.refusal = None

    def num_shared(self, sequence: Sequence) -> int:
        """Return the leading blocks of a sequence that others own too, and that its keys find."""
        cache = self.prefix_cache
        if cache is None or sequence.keys_revision != cache.revision:
            return 0
        for index, (key, block) in enumerate(zip(sequence.keys, sequence.block_ids, strict=False)):
            if not self.pool.is_shared(block) or cache.find_block(key) != block:
                return index
        return min(len(sequence.keys), len(sequence.block_ids))

    def keeps_released(self, sequence: Sequence) -> bool:
        """Return whether the CPU pool will keep the cached blocks of a sequence once evicted.

        Then there is no need to copy them before others need their place.
        """
        cpu_cache = self.cpu_cache
        if cpu_cache is None or not cpu_cache.worth.is_open:
            return False
        return self.cpu_pool.num_free - self.cpu_pool.num_idle >= len(sequence.block_ids)

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Return whether there is something to swap out, and the CPU pool has room for it."""
        num_blocks = len(sequence.block_ids) - self.num_shared(sequence)
        return 0 < num_blocks <= self.cpu_pool.num_free

    def swap_out(self, sequence: Sequence, step: int) -> list[BlockCopy]:
        """Move the blocks that others do not share to the CPU pool; return the copies for `step`.

        The others are looked up again when it is swapped in.
        """
        num_shared = self.num_shared(sequence)
        sources = sequence.block_ids[num_shared:]
        targets = [self.cpu_pool.allocate() for _ in sources]
        for source, target in zip(sources, targets, strict=True):
            self.pool.pin(source)
            self.cpu_pool.pin(target)
        self._swaps.add_blocks(step, sources, targets)
        self.release(sequence)
        sequence.num_left_behind = num_shared
        sequence.cpu_block_ids = targets
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]

    def swap_in(
        self, sequence: Sequence, step: int, *, num_tokens: int, num_spare: int
    ) -> list[BlockCopy] | None:
        """Move a sequence back with blocks for `num_tokens`, or return None without room.

        Blocks that are still cached are shared, and only the others copied; they are valid once
        `step` is acknowledged. If a block that was not swapped out is no longer cached, the
        sequence loses all others too and is to be recomputed.
        """
        num_blocks = self.blocks_for(num_tokens)
        num_needed = num_blocks + num_spare
        if self._is_still_refused(sequence, num_needed):
            return None
        found = self._find_cached(sequence)
        # It writes to no block of tokens that it has computed.
        hits = found[: sequence.num_computed // self.block_size]
        if len(hits) < sequence.num_left_behind:
            self.release(sequence)
            return None
        num_shared = sum(not self.pool.is_idle(block) for block in hits)
        if num_needed - num_shared > self.pool.num_free:
            self._refuse(sequence, num_hits=len(found), num_shared=num_shared)
            return None
        for block in hits:
            self.pool.share(block)
        sources = sequence.cpu_block_ids[len(hits) - sequence.num_left_behind :]
        targets = [self.pool.allocate() for _ in sources]
        for source, target in zip(sources, targets, strict=True):
            self.cpu_pool.pin(source)
            self.pool.pin(target)
        self._swaps.add_blocks(step, targets, sources)
        self.release(sequence)
        sequence.block_ids = hits + targets
        sequence.num_slots = len(sequence.block_ids) * self.block_size
        sequence.reserved_block_ids = [
            self.pool.allocate() for _ in range(num_blocks - len(sequence.block_ids))
        ]
        if self._finder is not None:
            num_proven = self._finder.num_proven(hits)
            if num_proven < len(hits):
                sequence.num_proven = min(sequence.num_proven, num_proven)
        self._set_registered(sequence, len(hits))
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]

    def num_lacking(self, sequence: Sequence, *, num_tokens: int, num_spare: int) -> int:
        """Return the blocks that a refused sequence lacks beyond those free or in transit."""
        num_needed = self.blocks_for(num_tokens) + num_spare
        if sequence.refusal is not None:
            num_needed -= sequence.refusal.num_shared
        return num_needed - self.pool.num_free - self.pool.num_in_transit

    def num_owned_alone(self, sequence: Sequence) -> int:
        """Return the blocks of a running sequence that no other owns, in O(log n).

        An estimate: it holds if those behind the first such block are such blocks too.
        """
        blocks, is_shared = sequence.block_ids, self.pool.is_shared
        num_shared = bisect_left(blocks, True, key=lambda block: not is_shared(block))
        return len(blocks) - num_shared + len(sequence.reserved_block_ids)

    def acknowledge(self, step: int) -> None:
        """Unpin the blocks of copies up to `step`, which every rank has finished."""
        for swap in self._swaps.take_ended(step):
            for block in reversed(swap.block_ids):
                self.pool.unpin(block)
            for block in swap.cpu_block_ids:
                self.cpu_pool.unpin(block)
            self._arriving.difference_update(swap.block_ids)
        if self.cpu_cache is not None:
            self.cpu_cache.acknowledge(step)

    def take_copies(self, step: int) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Return the copies of cached blocks to and from the CPU pool, for the plan of `step`."""
        evictions = [] if self.cpu_cache is None else self.cpu_cache.take_copies(step)
        restores, self._restores = self._restores, []
        if restores:
            targets = [copy.target for copy in restores]
            self._swaps.add_blocks(step, targets, [copy.source for copy in restores])
        return evictions, restores

    def _restore(self, sequence: Sequence, first: int) -> list[int]:
        """Have cached blocks copied back from index `first` on, and return their new places."""
        cpu_cache, cache = self.cpu_cache, self.prefix_cache
        if cpu_cache is None or cache is None or self._finder is None:
            return []
        sources = self._finder.find_cpu_blocks(sequence, first)
        # Places for them may be those of blocks that are copied to the CPU pool.
        for source in sources:
            self.cpu_pool.share(source)
            self.cpu_pool.pin(source)
            self.cpu_pool.release(source)
        targets = [self.pool.allocate() for _ in sources]
        for key, source, target in zip(sequence.keys[first:], sources, targets, strict=False):
            cache.add_block(key, target)
            self.pool.keep(target)
            self.pool.pin(target)
            self._restores.append(BlockCopy(source, target))
        if targets:
            cache.prove_blocks(targets)
            sequence.awaits_copies = True
            self._arriving.update(targets)
            cpu_cache.note_restored(sources)
        return targets

    def _forget_block(self, block: int) -> None:
        """Remove an evicted block from the prefix cache, which may live on in the CPU pool."""
        cache = self.prefix_cache
        assert cache is not None
        if self.cpu_cache is not None and cache.is_proven(block):
            key = cache.key_of(block)
            assert key is not None
            self.cpu_cache.save_block(key, block)
        cache.forget_block(block)

    def _refuse(self, sequence: Sequence, *, num_hits: int, num_shared: int) -> None:
        """Note why a sequence has no room, so that later steps need not look for its prefix."""
        if self._refusals is not None:
            self._refusals.note_refusal(
                sequence, self.pool, num_hits=num_hits, num_shared=num_shared
            )

    def _is_still_refused(self, sequence: Sequence, num_needed: int) -> bool:
        """Return whether there is certainly no room yet, in O(1)."""
        return self._refusals is not None and self._refusals.is_still_refused(
            sequence, self.pool, num_needed=num_needed
        )

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Return the longest prefix of a sequence that is cached on the device, in blocks."""
        return [] if self._finder is None else self._finder.find_blocks(sequence)

    def _set_registered(self, sequence: Sequence, num_blocks: int) -> None:
        sequence.num_registered = num_blocks
        if self.prefix_cache is None:
            sequence.next_check = sequence.max_length
        elif num_blocks - sequence.num_proven > _MAX_UNPROVEN:
            # The next token proves some.
            sequence.next_check = 0
        else:
            next_full, max_length = (num_blocks + 1) * self.block_size, sequence.max_length
            sequence.next_check = next_full if next_full < max_length else max_length
