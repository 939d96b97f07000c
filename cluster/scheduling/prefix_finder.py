"""Looks up the leading blocks of sequences, in the device pool, in the CPU pool and on the disk.

It computes the keys of sequences as far as look-ups need them, and changes nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.scheduling.sequence import FailedAdmission, Sequence
from pagedray.batch import BlockCopy

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.block_pool import BlockPool
    from cluster.scheduling.cpu_prefix_cache import BlockIndex, CpuPrefixCache
    from cluster.scheduling.disk_prefix_cache import DiskPrefixCache
    from cluster.scheduling.prefix_cache import BlockKey, PrefixCache, PromptKeys
    from pagedray.request import Request

__all__ = ["FailedAdmissions", "HostLoads", "PrefixFinder", "PrefixRegistry"]

_MIN_HASHED_AHEAD = 1024
"""Prompt tokens from which on keys are computed before a request is queued, so that no step waits
for it; kept, they take up more memory than the tokens."""
_MAX_UNVERIFIED = 8
"""Registered blocks of a running sequence that need not be verified yet, which costs time."""


class PrefixFinder:
    """Finds what is cached of a sequence."""

    __slots__ = ("_block_size", "_cache", "_cpu_cache")

    def __init__(
        self, cache: PrefixCache, cpu_cache: CpuPrefixCache | None, *, block_size: int
    ) -> None:
        self._cache = cache
        self._cpu_cache = cpu_cache
        self._block_size = block_size

    def hash_prompt(self, request: Request, prompt: array[int]) -> PromptKeys | None:
        """Return the keys of a long prompt, which take milliseconds; None if it is short.

        May be called from any thread.
        """
        if not self._cache.is_enabled or len(prompt) < _MIN_HASHED_AHEAD:
            return None
        return self._cache.hash_prompt(
            prompt, block_size=self._block_size, tenant=request.tenant, salt=request.cache_salt
        )

    def find_blocks(self, sequence: Sequence) -> list[int]:
        """Return the longest prefix of a sequence that is cached on the device, in blocks."""
        blocks = sequence.blocks
        if blocks.keys_revision != self._cache.revision:
            blocks.keys = []
            blocks.keys_revision = self._cache.revision
        return self._cache.find_prefix(
            blocks.keys,
            b"" if blocks.keys else self.parent(sequence, 0),
            sequence.token_ids,
            num_blocks=self.num_shareable(sequence),
            block_size=self._block_size,
        )

    def find_cpu_blocks(self, sequence: Sequence, first: int) -> list[int]:
        """Return the blocks from index `first` on that are better copied back than computed.

        `find_blocks` has found those before them.
        """
        cpu_cache = self._cpu_cache
        if cpu_cache is None:
            return []
        found: list[int] = []
        num_shareable = self.num_shareable(sequence)
        for index in range(first, num_shareable):
            key = self.key_at(sequence, index)
            block = cpu_cache.find_block(key)
            # Those behind a missing one may be on the device, where none is twice.
            if block is None or self._cache.find_block(key) is not None:
                break
            found.append(block)
        end = first + len(found)
        while end < num_shareable:
            if not cpu_cache.worth.note_lookup(self.key_at(sequence, end).digest):
                break
            end += 1
        return found if found and cpu_cache.worth.is_restored(len(found), first=first) else []

    def find_disk_keys(
        self, sequence: Sequence, disk_cache: DiskPrefixCache
    ) -> tuple[list[BlockKey], int]:
        """Return the keys of blocks that are better read from the disk than computed.

        Also returns the last step that reads others that the sequence needs, or -1.
        """
        cpu_cache = self._cpu_cache
        assert cpu_cache is not None
        keys: list[BlockKey] = []
        first_read, num_kept, last_step = 0, 0, -1
        for index in range(len(self.find_blocks(sequence)), self.num_shareable(sequence)):
            key = self.key_at(sequence, index)
            if self._cache.find_block(key) is not None:
                break
            step = disk_cache.step_of_read(key)
            if step is not None:
                last_step = max(last_step, step)
            elif cpu_cache.find_block(key) is not None:
                # Those that are read must not take its place.
                cpu_cache.touch_key(key)
                num_kept += 1
            elif disk_cache.find_block(key) is not None and not cpu_cache.has_key(key):
                first_read = first_read if keys else index
                keys.append(key)
            else:
                break
        del keys[disk_cache.num_readable(num_kept) :]
        is_worth = keys and cpu_cache.worth.is_read(
            len(keys), num_reading=disk_cache.num_reading, first=first_read
        )
        return (keys if is_worth else []), last_step

    def num_shareable(self, sequence: Sequence) -> int:
        """Return the blocks of known tokens that may be shared: one token is left to compute.

        None may be shared by a sequence whose prompt's log-probabilities are to be computed.
        """
        if not self._cache.is_enabled:
            return 0
        if sequence.index == 0 and sequence.active.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self._block_size

    def key_at(self, sequence: Sequence, index: int) -> BlockKey:
        """Return the key of block `index`, whose predecessors have theirs."""
        keys = sequence.blocks.keys
        if index < len(keys):
            return keys[index]
        assert index == len(keys)
        parent = keys[-1].digest if keys else self.parent(sequence, 0)
        first = index * self._block_size
        tokens = sequence.token_ids[first : first + self._block_size]
        key = self._cache.key_after(parent, tokens)
        keys.append(key)
        return key

    def parent(self, sequence: Sequence, index: int) -> bytes:
        """Return the digest before that of block `index`."""
        if index:
            return sequence.blocks.keys[index - 1].digest
        request = sequence.active.request
        return self._cache.root(request.tenant, request.cache_salt)


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
        lower_tiers: AnySequence[BlockIndex],
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
                if index < blocks.num_verified:
                    cache.mark_verified((block,))
            index += 1
        self.note_registered(sequence, index)

    def note_registered(self, sequence: Sequence, num_blocks: int) -> None:
        """Record that the prefix cache has the first blocks of a sequence, and no others."""
        sequence.blocks.num_registered = num_blocks
        if not self._cache.is_enabled:
            sequence.recheck_at = sequence.max_length
        elif num_blocks - sequence.blocks.num_verified > _MAX_UNVERIFIED:
            # The next token verifies some.
            sequence.recheck_at = 0
        else:
            next_full, max_length = (num_blocks + 1) * self._block_size, sequence.max_length
            sequence.recheck_at = next_full if next_full < max_length else max_length

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

    def mark_verified(self, sequence: Sequence) -> None:
        """Record that the logits that gave a sequence its last token were finite."""
        blocks = sequence.blocks
        if blocks.num_verified >= blocks.num_registered:
            return
        num_full = (len(sequence.token_ids) - 1) // self._block_size
        verified = blocks.ids[blocks.num_verified : min(num_full, blocks.num_registered)]
        self._cache.mark_verified(verified)
        blocks.num_verified += len(verified)

    def forget_blocks(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from the prefix cache, because its logits were not finite.

        It may have lost them already, so they are found by their keys. Nor is anything found that
        another sequence computed on top of those that are not verified.
        """
        keys, first = sequence.blocks.keys, sequence.blocks.num_verified
        for key in keys:
            for tier in self._lower_tiers:
                tier.forget_key(key)
            block = self._cache.find_block(key)
            if block is not None:
                self._cache.forget_block(block)
                self._pool.discard(block)
        if first < len(keys):
            self._cache.invalidate_key(self._finder.parent(sequence, first), keys[first])


class FailedAdmissions:
    """Says in O(1) whether a sequence that found too few free blocks still does."""

    __slots__ = ("_cache", "_finder", "_pool")

    def __init__(self, cache: PrefixCache, finder: PrefixFinder, pool: BlockPool) -> None:
        """`pool` is the device pool."""
        self._cache = cache
        self._finder = finder
        self._pool = pool

    def note_failure(self, sequence: Sequence, *, num_hits: int, num_shared: int) -> None:
        """Note that a sequence has no room, with `num_hits` cached blocks on the device."""
        is_all = num_hits == self._finder.num_shareable(sequence)
        sequence.blocks.failure = FailedAdmission(
            None if is_all else sequence.blocks.keys[num_hits],
            num_shared,
            self._pool.num_reused + self._cache.num_forgotten,
            self._cache.revision,
        )

    def still_fails(self, sequence: Sequence, *, num_needed: int) -> bool:
        """Return whether there is certainly no room yet, in O(1).

        Among the cached blocks of a sequence, one more is in use only after an idle one was
        shared, one was forgotten and computed again, or the first missing one was computed.
        """
        failure, cache, pool = sequence.blocks.failure, self._cache, self._pool
        if failure is None or failure.revision != cache.revision:
            return False
        if failure.next_key is not None and cache.find_block(failure.next_key) is not None:
            return False
        num_changes = pool.num_reused + cache.num_forgotten - failure.num_changes
        return num_needed - failure.num_shared - num_changes > pool.num_free


class HostLoads:
    """The blocks that are being copied back."""

    __slots__ = ("_arriving", "_cache", "_copies", "_cpu_cache", "_finder", "_pool")

    def __init__(
        self,
        cache: PrefixCache,
        finder: PrefixFinder,
        pool: BlockPool,
        cpu_cache: CpuPrefixCache | None,
    ) -> None:
        """`pool` is the device pool. Without a `cpu_cache`, there is nothing to copy back."""
        self._cache = cache
        self._finder = finder
        self._pool = pool
        self._cpu_cache = cpu_cache
        self._copies: list[BlockCopy] = []
        """The copies of the plan that is being made."""
        self._arriving: set[int] = set()
        """Blocks of the device pool that they and the plans in flight write."""

    @property
    def num_planned(self) -> int:
        """Blocks that the plan being made copies back."""
        return len(self._copies)

    def restore_blocks(self, sequence: Sequence, first: int) -> list[int]:
        """Copy cached blocks from index `first` on back to the device; return their new blocks.

        The caller keeps room for them. They are pinned in both pools until it unpins them, once
        every rank has made the copies.
        """
        if self._cpu_cache is None:
            return []
        sources = self._finder.find_cpu_blocks(sequence, first)
        cpu_pool = self._cpu_cache.pool
        # Places for them may be those of blocks that are copied to the CPU pool.
        for source in sources:
            cpu_pool.share(source)
            cpu_pool.pin(source)
            cpu_pool.release(source)
        targets = [self._pool.allocate() for _ in sources]
        for key, source, target in zip(
            sequence.blocks.keys[first:], sources, targets, strict=False
        ):
            self._cache.add_block(key, target)
            self._pool.keep(target)
            self._pool.pin(target)
            self._copies.append(BlockCopy(source, target))
        if targets:
            self._cache.mark_verified(targets)
            sequence.blocks.awaits_copies = True
            self._arriving.update(targets)
            self._cpu_cache.note_restored(sources)
        return targets

    def are_arriving(self, blocks: Iterable[int]) -> bool:
        """Return whether any of `blocks` is still being copied back."""
        return not self._arriving.isdisjoint(blocks)

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies for the plan that is being made."""
        copies, self._copies = self._copies, []
        return copies

    def note_arrived(self, blocks: Iterable[int]) -> None:
        """Record that every rank has made its copies to `blocks`, which may include others."""
        self._arriving.difference_update(blocks)

    def clear(self) -> None:
        """Forget all copies, as after the ranks were replaced."""
        self._copies.clear()
        self._arriving.clear()
