"""The blocks of sequences: block tables, prefixes in every tier, forks and swaps.

Methods that allocate blocks allocate all that they need or none. The manager computes the keys of a
sequence as far as look-ups need them. The scheduler decides when a sequence runs or is preempted.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.costs import TierPolicy
from cluster.scheduling.sequence import FailedAdmission, Sequence
from cluster.scheduling.tiers import CpuTier, DeviceTier, DiskTier
from pagedray.batch import BlockCopy

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection

    from cluster.scheduling.costs import SwapCosts
    from cluster.scheduling.prefix_cache import BlockKey, PromptKeys
    from pagedray.request import Request

__all__ = ["KvManager", "KvOptions"]

_SAVED_TOKENS = 4
"""Evicted tokens that a step copies to the CPU pool at most, for each that it may compute."""
_MIN_HASHED_AHEAD = 1024
"""Prompt tokens from which on keys are computed before a request is queued, so that no step waits
for it; kept, they take up more memory than the tokens."""
_MAX_UNVERIFIED = 8
"""Registered blocks of a running sequence that need not be verified yet, which costs time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """The pools of blocks, and the tiers of the prefix cache in them.

    A tier needs the tier above it: without a prefix cache there is none in the CPU pool, and
    without a prefix cache in the CPU pool none on a disk.
    """

    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Number of blocks on the device."""
    num_cpu_blocks: int
    """Number of blocks in CPU memory."""
    num_disk_blocks: int = 0
    """Number of blocks on a disk."""
    enable_prefix_cache: bool = True
    enable_cpu_prefix_cache: bool = True
    hash_key: bytes | None = None
    """The key of the digests of blocks; None selects a random key."""


class KvManager:
    """Owns the tiers of the prefix cache, and with them the pools."""

    __slots__ = (
        "_swaps",
        "block_size",
        "cpu",
        "cpu_pool",
        "device",
        "disk",
        "num_hit_tokens",
        "num_queried_tokens",
        "pool",
    )

    def __init__(self, options: KvOptions, *, costs: SwapCosts | None, max_num_tokens: int) -> None:
        """Without costs, every copy is worth its time. A step has at most `max_num_tokens`."""
        self.block_size = options.block_size
        """Tokens per block."""
        has_cpu_tier = options.enable_prefix_cache and options.enable_cpu_prefix_cache
        num_cpu_blocks = options.num_cpu_blocks
        self.cpu = CpuTier(
            num_cpu_blocks,
            policy=TierPolicy(costs, num_blocks=num_cpu_blocks, block_size=self.block_size),
            max_saved=self.blocks_for(_SAVED_TOKENS * max_num_tokens),
            is_enabled=has_cpu_tier and num_cpu_blocks > 0,
        )
        self.disk: DiskTier | None = None
        if self.cpu.is_enabled and options.num_disk_blocks:
            self.disk = DiskTier(options.num_disk_blocks, self.cpu)
        self.device = DeviceTier(
            options.hash_key or secrets.token_bytes(32),
            num_blocks=options.num_blocks,
            is_enabled=options.enable_prefix_cache,
            below=self.cpu,
        )
        self.pool = self.device.pool
        self.cpu_pool = self.cpu.pool
        self._swaps: deque[CopiedBlocks] = deque()
        """Copies between the two pools that some rank may not have made, in order of steps."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def clear(self, damaged: Collection[int] | None = None) -> None:
        """Make every block free; the caller clears each sequence with `disown`.

        The CPU pool keeps its complete blocks except `damaged` blocks, or none if `damaged` is
        None; all other pools become empty.
        """
        self._swaps.clear()
        self.device.clear()
        self.cpu.begin_epoch(damaged)
        if self.disk is not None:
            self.disk.clear()

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def hash_prompt(self, request: Request, prompt: array[int]) -> PromptKeys | None:
        """Return the keys of a long prompt, which take milliseconds; None if it is short.

        May be called from any thread.
        """
        if not self.device.is_enabled or len(prompt) < _MIN_HASHED_AHEAD:
            return None
        return self.device.hash_prompt(
            prompt, block_size=self.block_size, tenant=request.tenant, salt=request.cache_salt
        )

    def awaits_disk(self, sequence: Sequence, step: int) -> bool:
        """Return whether a sequence should wait for blocks on the disk before it starts.

        The plan of `step` reads them. A sequence waits for the disk only once, even if its blocks
        are lost meanwhile, so that it starts eventually.
        """
        if self.disk is None:
            return False
        blocks = sequence.blocks
        if blocks.disk_step is None:
            keys, blocks.disk_step = self._find_disk_keys(sequence, self.disk)
            if keys:
                self.disk.read_blocks(keys, step)
                blocks.disk_step = step
        return blocks.disk_step > self.disk.read_step

    def admit(self, sequence: Sequence, *, num_tokens: int, num_spare: int) -> bool:
        """Give a sequence blocks for `num_tokens`, cached blocks first; return False without room.

        At least `num_spare` blocks stay free. `num_computed` becomes the number of cached tokens;
        at least one known token is always left to compute. If `awaits_copies`, the sequence must
        not run before the acknowledgement of the step with the copies of `take_copies`.
        """
        blocks, num_blocks = sequence.blocks, self.blocks_for(num_tokens)
        if self._still_fails(sequence, num_needed=num_blocks + num_spare):
            return False
        hits = self._find_blocks(sequence)
        if not self._has_room(sequence, hits, len(hits), num_needed=num_blocks + num_spare):
            return False
        self.pool.share_all(hits)
        awaits_copies = not self.device.arriving.isdisjoint(hits)
        if self.cpu.is_enabled:
            sources = self._find_cpu_blocks(sequence, len(hits))
            loaded = self.device.load_blocks(blocks.keys[len(hits) :], sources)
            awaits_copies = awaits_copies or bool(loaded)
            hits += loaded
        reserved = self.pool.allocate_all(num_blocks - len(hits))
        blocks.hold(hits, reserved, self.block_size, num_verified=self.device.num_verified(hits))
        blocks.awaits_copies = awaits_copies
        sequence.num_computed = blocks.num_slots
        if self.device.is_enabled:
            self.num_queried_tokens += len(sequence.token_ids)
            self.num_hit_tokens += blocks.num_slots
        self._note_registered(sequence, len(hits))
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
        shared = donor.blocks.ids[:num_shared]
        self.pool.share_owned(shared)
        blocks, reserved = sequence.blocks, self.pool.allocate_all(num_missing)
        target = reserved.pop()
        shared.append(target)
        num_verified = min(donor.blocks.num_verified, num_shared)
        blocks.hold(shared, reserved, self.block_size, num_verified=num_verified)
        blocks.keys = donor.blocks.keys[:num_shared]
        blocks.keys_revision = donor.blocks.keys_revision
        sequence.num_computed = last_position
        self._note_registered(sequence, num_shared)
        if last_position % self.block_size == 0:
            return []
        return [BlockCopy(donor.blocks.ids[num_shared], target)]

    def append(self, sequence: Sequence) -> int | None:
        """Add a block to a table and return it, or None if none is free."""
        blocks = sequence.blocks
        if blocks.reserved_ids:
            block = blocks.reserved_ids.pop()
        elif self.pool.num_free:
            block = self.pool.allocate()
        else:
            return None
        blocks.ids.append(block)
        blocks.num_slots += self.block_size
        return block

    def extend(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Extend a table to `num_tokens` with reserved blocks, and return them."""
        blocks = sequence.blocks
        return blocks.extend(self.blocks_for(num_tokens) - len(blocks.ids), self.block_size)

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, in both pools."""
        # The end of a prefix is useless without its beginning, so it is evicted first.
        blocks = sequence.blocks
        self.pool.release_all(blocks.ids)
        for block in blocks.reserved_ids:
            self.pool.release(block)
        for block in blocks.cpu_ids:
            self.cpu_pool.release(block)
        self.disown(sequence)

    def disown(self, sequence: Sequence) -> None:
        """Clear a sequence's record of its blocks."""
        sequence.blocks.clear()
        sequence.unchecked_until = 0

    def num_shared(self, sequence: Sequence) -> int:
        """Return the leading blocks of a sequence that others own too, and that its keys find."""
        blocks = sequence.blocks
        if blocks.keys_revision != self.device.revision:
            return 0
        for index, (key, block) in enumerate(zip(blocks.keys, blocks.ids, strict=False)):
            if not self.pool.is_shared(block) or self.device.find_block(key) != block:
                return index
        return min(len(blocks.keys), len(blocks.ids))

    def keeps_released(self, sequence: Sequence) -> bool:
        """Return whether the CPU pool will keep the cached blocks of a sequence once evicted.

        Then there is no need to copy them before others need their place.
        """
        if not self.cpu.is_enabled or not self.cpu.policy.is_open:
            return False
        return self.cpu_pool.num_free - self.cpu_pool.num_idle >= len(sequence.blocks.ids)

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Return whether there is something to swap out, and the CPU pool has room for it."""
        num_blocks = len(sequence.blocks.ids) - self.num_shared(sequence)
        return 0 < num_blocks <= self.cpu_pool.num_free

    def swap_out(self, sequence: Sequence, step: int) -> list[BlockCopy]:
        """Move the blocks that others do not share to the CPU pool; return the copies for `step`.

        The others are looked up again when it is swapped in.
        """
        num_shared = self.num_shared(sequence)
        sources = sequence.blocks.ids[num_shared:].tolist()
        targets = self.cpu_pool.allocate_all(len(sources))
        for source, target in zip(sources, targets, strict=True):
            self.pool.pin(source)
            self.cpu_pool.pin(target)
        self._swaps.append(CopiedBlocks(step, sources, targets))
        self.release(sequence)
        sequence.blocks.num_unswapped = num_shared
        sequence.blocks.cpu_ids = targets
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]

    def swap_in(
        self, sequence: Sequence, step: int, *, num_tokens: int, num_spare: int
    ) -> list[BlockCopy] | None:
        """Move a sequence back with blocks for `num_tokens`, or return None without room.

        Blocks that are still cached are shared, and only the others copied; they are valid once
        `step` is acknowledged. If a block that was not swapped out is no longer cached, the
        sequence loses all others too and is to be recomputed.
        """
        num_needed = self.blocks_for(num_tokens) + num_spare
        if self._still_fails(sequence, num_needed=num_needed):
            return None
        found = self._find_blocks(sequence)
        # It writes to no block of tokens that it has computed.
        hits = found[: sequence.num_computed // self.block_size]
        blocks = sequence.blocks
        if len(hits) < blocks.num_unswapped:
            self.release(sequence)
            return None
        if not self._has_room(sequence, hits, len(found), num_needed=num_needed):
            return None
        self.pool.share_all(hits)
        sources = blocks.cpu_ids[len(hits) - blocks.num_unswapped :]
        targets = self.pool.allocate_all(len(sources))
        for source, target in zip(sources, targets, strict=True):
            self.cpu_pool.pin(source)
            self.pool.pin(target)
        self._swaps.append(CopiedBlocks(step, targets, sources))
        num_verified = self.device.num_verified(hits)
        if num_verified == len(hits):
            num_verified = blocks.num_verified
        self.release(sequence)
        reserved = self.pool.allocate_all(num_needed - num_spare - len(hits) - len(targets))
        num_verified = min(blocks.num_verified, num_verified)
        blocks.hold(hits + targets, reserved, self.block_size, num_verified=num_verified)
        self._note_registered(sequence, len(hits))
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]

    def num_lacking(self, sequence: Sequence, *, num_tokens: int, num_spare: int) -> int:
        """Return how many blocks a waiting sequence lacks, beyond free blocks and transit."""
        num_needed = self.blocks_for(num_tokens) + num_spare
        failure = sequence.blocks.failure
        if failure is not None:
            num_needed -= failure.num_shared
        return num_needed - self.pool.num_free - self.pool.num_in_transit

    def num_owned_alone(self, sequence: Sequence) -> int:
        """Return the blocks of a running sequence that no other sequence owns, in O(log n).

        An estimate: it holds if the blocks behind the first such block are such blocks too.
        """
        blocks, is_shared = sequence.blocks, self.pool.is_shared
        num_shared = bisect_left(blocks.ids, True, key=lambda block: not is_shared(block))
        return len(blocks.ids) - num_shared + len(blocks.reserved_ids)

    def acknowledge(self, step: int) -> None:
        """Unpin the blocks of copies up to `step`, which every rank has finished."""
        while self._swaps and self._swaps[0].step <= step:
            swap = self._swaps.popleft()
            self.device.end_copies(swap.block_ids)
            for block in swap.cpu_block_ids:
                self.cpu_pool.unpin(block)
        self.cpu.acknowledge(step)

    def take_copies(self, step: int) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Return the copies of cached blocks to and from the CPU pool, for the plan of `step`."""
        loads = self.device.take_loads()
        if loads:
            targets = [copy.target for copy in loads]
            self._swaps.append(CopiedBlocks(step, targets, [copy.source for copy in loads]))
        return self.cpu.take_copies(step) if self.cpu.is_enabled else [], loads

    def register_blocks(self, sequence: Sequence) -> None:
        """Add blocks that are full of known, computed tokens to the prefix cache."""
        device = self.device
        if not device.is_enabled:
            return
        num_tokens = len(sequence.token_ids)
        if num_tokens > sequence.num_computed:
            num_tokens = sequence.num_computed
        blocks = sequence.blocks
        num_full, index = num_tokens // self.block_size, blocks.num_registered
        while index < num_full:
            block = blocks.ids[index]
            if device.add_block(self._key_at(sequence, index), block) and (
                index < blocks.num_verified
            ):
                device.mark_verified((block,))
            index += 1
        self._note_registered(sequence, index)

    def take_back(self, sequence: Sequence) -> None:
        """Mark the last known token as not computed, so that a later plan computes it again.

        Its block must not have been shared since it was computed, and is not shared until then.
        """
        sequence.num_computed -= 1
        blocks, index = sequence.blocks, sequence.num_computed // self.block_size
        if index >= blocks.num_registered:
            return
        block = blocks.ids[index]
        if self.device.find_block(blocks.keys[index]) == block:
            self.device.forget_block(block)
        self._note_registered(sequence, index)

    def mark_verified(self, sequence: Sequence) -> None:
        """Record that the logits that gave a sequence its last token were finite."""
        blocks = sequence.blocks
        if blocks.num_verified >= blocks.num_registered:
            return
        num_full = (len(sequence.token_ids) - 1) // self.block_size
        verified = blocks.ids[blocks.num_verified : min(num_full, blocks.num_registered)]
        self.device.mark_verified(verified)
        blocks.num_verified += len(verified)

    def forget_blocks(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from every tier, because its logits were not finite.

        Look up blocks by key: the sequence may have released them. Blocks that other sequences
        computed on top of unverified blocks are not found any more either.
        """
        keys, first = sequence.blocks.keys, sequence.blocks.num_verified
        for key in keys:
            self.cpu.forget_key(key)
            if self.disk is not None:
                self.disk.forget_key(key)
            block = self.device.find_block(key)
            if block is not None:
                self.device.forget_block(block)
        if first < len(keys):
            self.device.invalidate_key(self._parent(sequence, first), keys[first])

    def counts(self) -> dict[str, int]:
        """Return the fields of `SchedulerStats` that count blocks and cached tokens, by name."""
        pool, cpu_pool, cpu = self.pool, self.cpu_pool, self.cpu
        counts = {
            "num_blocks": pool.num_blocks,
            "num_free_blocks": pool.num_free,
            "num_cached_blocks": pool.num_idle,
            "num_transit_blocks": pool.num_in_transit,
            "num_cpu_blocks": cpu_pool.num_blocks,
            "num_free_cpu_blocks": cpu_pool.num_free,
            "num_cached_cpu_blocks": cpu_pool.num_idle,
            "num_transit_cpu_blocks": cpu_pool.num_in_transit,
            "num_queried_tokens": self.num_queried_tokens,
            "num_hit_tokens": self.num_hit_tokens,
            "num_saved_blocks": cpu.num_saved_blocks,
            "num_restored_blocks": cpu.num_loaded_blocks,
            "num_cpu_hit_tokens": cpu.num_loaded_blocks * self.block_size,
            "num_kept_cpu_blocks": cpu.num_kept_blocks,
            "num_kept_hit_tokens": cpu.num_kept_hit_blocks * self.block_size,
            "num_damaged_cpu_blocks": cpu.num_damaged_blocks,
        }
        if (disk := self.disk) is not None:
            counts |= {
                "num_disk_blocks": disk.pool.num_blocks,
                "num_cached_disk_blocks": disk.pool.num_idle,
                "num_disk_hit_tokens": disk.num_read_blocks * self.block_size,
                "num_written_blocks": disk.num_written_blocks,
                "num_read_blocks": disk.num_read_blocks,
                "num_failed_writes": disk.num_failed_writes,
                "num_failed_reads": disk.num_failed_reads,
            }
        return counts

    def _find_blocks(self, sequence: Sequence) -> list[int]:
        """Return the longest prefix of a sequence that is cached on the device, in blocks."""
        blocks, device = sequence.blocks, self.device
        if blocks.keys_revision != device.revision:
            blocks.keys = []
            blocks.keys_revision = device.revision
        return device.find_prefix(
            blocks.keys,
            b"" if blocks.keys else self._parent(sequence, 0),
            sequence.token_ids,
            num_blocks=self._num_shareable(sequence),
            block_size=self.block_size,
        )

    def _find_cpu_blocks(self, sequence: Sequence, first: int) -> list[int]:
        """Return the CPU blocks from index `first` on that are better loaded than computed.

        `_find_blocks` has found the blocks before them.
        """
        found: list[int] = []
        num_shareable = self._num_shareable(sequence)
        for index in range(first, num_shareable):
            key = self._key_at(sequence, index)
            block = self.cpu.find_block(key)
            # Blocks behind a missing block may be on the device, where none is twice.
            if block is None or self.device.find_block(key) is not None:
                break
            found.append(block)
        policy, end = self.cpu.policy, first + len(found)
        while end < num_shareable and policy.note_lookup(self._key_at(sequence, end).digest):
            end += 1
        return found if found and policy.is_restored(len(found), first=first) else []

    def _find_disk_keys(self, sequence: Sequence, disk: DiskTier) -> tuple[list[BlockKey], int]:
        """Return the keys of blocks that are better read from the disk than computed.

        Also returns the last step that reads others that the sequence needs, or -1.
        """
        keys: list[BlockKey] = []
        first_read, num_kept, last_step = 0, 0, -1
        for index in range(len(self._find_blocks(sequence)), self._num_shareable(sequence)):
            key = self._key_at(sequence, index)
            if self.device.find_block(key) is not None:
                break
            step = disk.step_of_read(key)
            if step is not None:
                last_step = max(last_step, step)
            elif self.cpu.find_block(key) is not None:
                # Blocks that are read must not take its place.
                self.cpu.touch_key(key)
                num_kept += 1
            elif disk.find_block(key) is not None and not self.cpu.has_key(key):
                first_read = first_read if keys else index
                keys.append(key)
            else:
                break
        del keys[disk.num_readable(num_kept) :]
        is_worth = keys and self.cpu.policy.is_read(
            len(keys), num_reading=disk.num_reading, first=first_read
        )
        return (keys if is_worth else []), last_step

    def _has_room(
        self, sequence: Sequence, hits: list[int], num_found: int, *, num_needed: int
    ) -> bool:
        """Return whether enough blocks are free to use the hits of `num_found` cached blocks."""
        num_shared = self.pool.num_in_use(hits) if hits else 0
        if num_needed - num_shared <= self.pool.num_free:
            return True
        blocks = sequence.blocks
        is_all = num_found == self._num_shareable(sequence)
        blocks.failure = FailedAdmission(
            None if is_all else blocks.keys[num_found],
            num_shared,
            self.pool.num_reused + self.device.num_forgotten,
            self.device.revision,
        )
        return False

    def _still_fails(self, sequence: Sequence, *, num_needed: int) -> bool:
        """Return whether there is certainly no room yet, in O(1).

        The number of a sequence's cached blocks in use grows only if an idle block was shared, a
        block was forgotten and computed again, or the first missing block was computed.
        """
        failure, device, pool = sequence.blocks.failure, self.device, self.pool
        if failure is None or failure.revision != device.revision:
            return False
        if failure.next_key is not None and device.find_block(failure.next_key) is not None:
            return False
        num_changes = pool.num_reused + device.num_forgotten - failure.num_changes
        return num_needed - failure.num_shared - num_changes > pool.num_free

    def _note_registered(self, sequence: Sequence, num_blocks: int) -> None:
        """Record that the prefix cache has the first blocks of a sequence, and no others."""
        sequence.blocks.num_registered = num_blocks
        if not self.device.is_enabled:
            sequence.recheck_at = sequence.max_length
        elif num_blocks - sequence.blocks.num_verified > _MAX_UNVERIFIED:
            # The next token verifies some.
            sequence.recheck_at = 0
        else:
            next_full, max_length = (num_blocks + 1) * self.block_size, sequence.max_length
            sequence.recheck_at = next_full if next_full < max_length else max_length

    def _num_shareable(self, sequence: Sequence) -> int:
        """Return the blocks of known tokens that may be shared: one token is left to compute.

        None are shareable while log-probabilities of the prompt are to be computed.
        """
        if not self.device.is_enabled:
            return 0
        if sequence.index == 0 and sequence.active.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self.block_size

    def _key_at(self, sequence: Sequence, index: int) -> BlockKey:
        """Return the key of block `index`, after the keys of its predecessors."""
        keys = sequence.blocks.keys
        if index < len(keys):
            return keys[index]
        assert index == len(keys)
        first = index * self.block_size
        tokens = sequence.token_ids[first : first + self.block_size]
        key = self.device.key_after(self._parent(sequence, index), tokens)
        keys.append(key)
        return key

    def _parent(self, sequence: Sequence, index: int) -> bytes:
        """Return the digest before the digest of block `index`."""
        if index:
            return sequence.blocks.keys[index - 1].digest
        request = sequence.active.request
        return self.device.root(request.tenant, request.cache_salt)


class CopiedBlocks(NamedTuple):
    """The blocks of both pools that the plan of a step copies, in either direction."""

    step: int
    block_ids: list[int]
    cpu_block_ids: list[int]
