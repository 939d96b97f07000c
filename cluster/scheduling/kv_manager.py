"""The blocks of sequences: block tables, prefixes in every tier, forks and swaps.

Methods that allocate blocks allocate all that they need or none. The manager computes the keys of a
sequence as far as look-ups need them. The scheduler decides when a sequence runs or is preempted.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.costs import TierPolicy
from cluster.scheduling.device_tier import DeviceTier
from cluster.scheduling.sequence import (
    DiskRead,
    FailedAdmission,
    Queued,
    Sequence,
    Swapped,
    Waiting,
)
from cluster.scheduling.tiers import CpuTier, DiskTier
from pagedray.batch import BlockCopy

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.costs import SwapCosts
    from cluster.scheduling.device_tier import BlockKey, PromptKeys
    from pagedray.request import Request

__all__ = ["Admitted", "KvManager", "KvOptions", "Refusal"]

_SAVED_TOKENS = 4
"""Evicted tokens that a step copies to the CPU pool at most, for each that it may compute."""
_MIN_HASHED_AHEAD = 1024
"""Prompt tokens from which on keys are computed before a request is queued, so that no step waits
for it; kept, they take up more memory than the tokens."""


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
            save=self.cpu.save_block,
        )
        self.pool = self.device.pool
        self.cpu_pool = self.cpu.pool
        self._swaps: deque[CopiedBlocks] = deque()
        """Copies between the two pools that some rank may not have made, in order of steps."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def clear(self, *, keeps_cpu_pool: bool = False) -> None:
        """Make every block free; the caller clears each sequence with `drop_blocks`.

        The CPU pool may keep its complete blocks; all other pools become empty.
        """
        self._swaps.clear()
        self.device.clear()
        self.cpu.begin_epoch(is_kept=keeps_cpu_pool)
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
        waiting = sequence.state
        assert isinstance(waiting, Waiting)
        if waiting.disk_read is None:
            waiting.disk_read = self._begin_disk_read(sequence, self.disk, step)
        read_step = waiting.disk_read.step
        return read_step is not None and read_step > self.disk.read_step

    def admit(
        self, sequence: Sequence, step: int, *, num_tokens: int, num_spare: int
    ) -> Admitted | Refusal:
        """Give a waiting sequence blocks for `num_tokens`, cached blocks first.

        At least `num_spare` blocks stay free. `num_computed` becomes the number of cached tokens;
        at least one known token is always left to compute. The plan of `step` has the copies that
        the sequence awaits.
        """
        if self.awaits_disk(sequence, step):
            return Refusal.AWAITS_DISK
        num_blocks = -(-num_tokens // self.block_size)
        if self._still_fails(sequence, num_needed=num_blocks + num_spare):
            return Refusal.NO_ROOM
        num_shareable = self._num_shareable(sequence)
        hits = self._find_blocks(sequence, num_shareable)
        num_verified = self.device.num_verified(hits)
        num_in_use = self.pool.num_in_use(hits)
        if num_blocks + num_spare - num_in_use > self.pool.num_free:
            self._note_failure(sequence, num_shareable, num_found=len(hits), num_shared=num_in_use)
            return Refusal.NO_ROOM
        self.pool.share_all(hits)
        awaits_copies = not self.device.arriving.isdisjoint(hits)
        if self.cpu.is_enabled and len(hits) < num_shareable:
            loaded = self._load_blocks(sequence, len(hits), num_shareable)
            awaits_copies = awaits_copies or bool(loaded)
            # Blocks are loaded only if they are verified.
            num_verified += len(loaded) if num_verified == len(hits) else 0
            hits += loaded
        num_cached = len(hits)
        sequence.num_computed = num_cached * self.block_size
        if self.device.is_enabled:
            self.num_queried_tokens += len(sequence.token_ids)
            self.num_hit_tokens += sequence.num_computed
        sequence.hold_blocks(
            hits,
            self.pool.allocate_all(num_blocks - num_cached),
            block_size=self.block_size,
            num_registered=num_cached if self.device.is_enabled else None,
            num_verified=num_verified,
        )
        return Admitted(awaits_copies=awaits_copies)

    def fork(
        self, sequence: Sequence, donor: Sequence, *, num_tokens: int, num_spare: int
    ) -> Admitted | Refusal:
        """Share a sibling's prompt with a sequence.

        The last prompt token is left to compute. Its block is written and hence a copy, unless
        that token is the first in it.
        """
        last_position = sequence.num_prompt_tokens - 1
        num_shared = last_position // self.block_size
        num_missing = self.blocks_for(num_tokens) - num_shared
        if num_missing + num_spare > self.pool.num_free:
            return Refusal.NO_ROOM
        shared = donor.blocks.ids[:num_shared]
        self.pool.share_owned(shared)
        reserved = self.pool.allocate_all(num_missing)
        target = reserved.pop()
        shared.append(target)
        sequence.hold_blocks(
            shared,
            reserved,
            block_size=self.block_size,
            num_registered=num_shared if self.device.is_enabled else None,
            num_verified=min(donor.blocks.num_verified, num_shared),
        )
        sequence.blocks.keys = donor.blocks.keys[:num_shared]
        sequence.blocks.keys_revision = donor.blocks.keys_revision
        sequence.num_computed = last_position
        if last_position % self.block_size == 0:
            return Admitted(donor=donor)
        return Admitted(donor=donor, copies=[BlockCopy(donor.blocks.ids[num_shared], target)])

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

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, in both pools."""
        # The end of a prefix is useless without its beginning, so it is evicted first.
        self.pool.release_all(sequence.blocks.ids)
        for block in sequence.blocks.reserved_ids:
            self.pool.release(block)
        if isinstance(sequence.state, Swapped):
            for block in sequence.state.cpu_ids:
                self.cpu_pool.release(block)
            sequence.state.cpu_ids = []
        sequence.drop_blocks()

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

    def swap_out(self, sequence: Sequence, step: int) -> tuple[Swapped, list[BlockCopy]]:
        """Move the blocks that others do not share to the CPU pool, in the plan of `step`.

        Returns the new state of the sequence, and the copies. The other blocks are looked up again
        when the sequence is swapped in.
        """
        num_shared = self.num_shared(sequence)
        sources = sequence.blocks.ids[num_shared:].tolist()
        targets = self.cpu_pool.allocate_all(len(sources))
        for source, target in zip(sources, targets, strict=True):
            self.pool.pin(source)
            self.cpu_pool.pin(target)
        self._swaps.append(CopiedBlocks(step, sources, targets))
        self.release(sequence)
        copies = [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]
        return Swapped(cpu_ids=targets, num_unswapped=num_shared, ready_step=step), copies

    def swap_in(
        self, sequence: Sequence, step: int, *, num_tokens: int, num_spare: int
    ) -> list[BlockCopy] | Refusal:
        """Move a sequence back with blocks for `num_tokens`, and return the copies.

        Blocks that are still cached are shared, and only the others copied; they are valid once
        `step` is acknowledged. If a block that was not swapped out is no longer cached, the
        sequence loses all others too and is to be recomputed.
        """
        swapped = sequence.state
        assert isinstance(swapped, Swapped)
        num_needed = self.blocks_for(num_tokens) + num_spare
        if self._still_fails(sequence, num_needed=num_needed):
            return Refusal.NO_ROOM
        num_shareable = self._num_shareable(sequence)
        found = self._find_blocks(sequence, num_shareable)
        # It writes to no block of tokens that it has computed.
        hits = found[: sequence.num_computed // self.block_size]
        if len(hits) < swapped.num_unswapped:
            self.release(sequence)
            return Refusal.LOST
        num_in_use = self.pool.num_in_use(hits)
        if num_needed - num_in_use > self.pool.num_free:
            self._note_failure(sequence, num_shareable, num_found=len(found), num_shared=num_in_use)
            return Refusal.NO_ROOM
        self.pool.share_all(hits)
        sources = swapped.cpu_ids[len(hits) - swapped.num_unswapped :]
        targets = self.pool.allocate_all(len(sources))
        for source, target in zip(sources, targets, strict=True):
            self.cpu_pool.pin(source)
            self.pool.pin(target)
        self._swaps.append(CopiedBlocks(step, targets, sources))
        num_verified = self.device.num_verified(hits)
        if num_verified == len(hits) or num_verified > sequence.blocks.num_verified:
            num_verified = sequence.blocks.num_verified
        self.release(sequence)
        sequence.hold_blocks(
            hits + targets,
            self.pool.allocate_all(num_needed - num_spare - len(hits) - len(targets)),
            block_size=self.block_size,
            num_registered=len(hits) if self.device.is_enabled else None,
            num_verified=num_verified,
        )
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]

    def num_lacking(self, sequence: Sequence, *, num_tokens: int, num_spare: int) -> int:
        """Return how many blocks a queued sequence lacks, beyond free blocks and transit."""
        assert isinstance(sequence.state, Queued)
        num_needed = self.blocks_for(num_tokens) + num_spare
        failure = sequence.state.failure
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
        sequence.note_registered(index, self.block_size)

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
        sequence.note_registered(index, self.block_size)

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

    def _find_blocks(self, sequence: Sequence, num_shareable: int) -> list[int]:
        """Return the longest prefix of a sequence that is cached on the device, in blocks."""
        blocks, device = sequence.blocks, self.device
        if blocks.keys_revision != device.revision:
            blocks.keys = []
            blocks.keys_revision = device.revision
        request = sequence.active.request
        return device.find_prefix(
            blocks.keys,
            b"" if blocks.keys else device.root(request.tenant, request.cache_salt),
            sequence.token_ids,
            num_blocks=num_shareable,
            block_size=self.block_size,
        )

    def _load_blocks(self, sequence: Sequence, first: int, num_shareable: int) -> list[int]:
        """Copy blocks from index `first` on from the CPU pool, and return the device blocks.

        `_find_blocks` has found the blocks before them. None are copied if they are better
        computed.
        """
        sources: list[int] = []
        for index in range(first, num_shareable):
            key = self._key_at(sequence, index)
            block = self.cpu.find_block(key)
            # Blocks behind a missing block may be on the device, where none is twice.
            if block is None or self.device.find_block(key) is not None:
                break
            sources.append(block)
        policy, end = self.cpu.policy, first + len(sources)
        while end < num_shareable and policy.note_lookup(self._key_at(sequence, end).digest):
            end += 1
        if not sources or not policy.is_restored(len(sources), first=first):
            return []
        # The device blocks for the copies may be evicted to the CPU pool.
        self.cpu.begin_loads(sources)
        return self.device.load_blocks(sequence.blocks.keys[first:], sources)

    def _begin_disk_read(self, sequence: Sequence, disk: DiskTier, step: int) -> DiskRead:
        """Read the blocks that are better read from the disk than computed, in the plan of `step`.

        Returns the last step that reads blocks that the sequence needs.
        """
        keys: list[BlockKey] = []
        first_read, num_kept, last_step = 0, 0, None
        num_shareable = self._num_shareable(sequence)
        for index in range(len(self._find_blocks(sequence, num_shareable)), num_shareable):
            key = self._key_at(sequence, index)
            if self.device.find_block(key) is not None:
                break
            read_step = disk.step_of_read(key)
            if read_step is not None:
                last_step = read_step if last_step is None else max(last_step, read_step)
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
        if not keys or not self.cpu.policy.is_read(
            len(keys), num_reading=disk.num_reading, first=first_read
        ):
            return DiskRead(last_step)
        disk.read_blocks(keys, step)
        return DiskRead(step)

    def _note_failure(
        self, sequence: Sequence, num_shareable: int, *, num_found: int, num_shared: int
    ) -> None:
        """Note that too few blocks are free to share `num_shared` of `num_found` cached blocks."""
        assert isinstance(sequence.state, Queued)
        sequence.state.failure = FailedAdmission(
            None if num_found == num_shareable else sequence.blocks.keys[num_found],
            num_shared,
            self.pool.num_reused + self.device.num_forgotten,
            self.device.revision,
        )

    def _still_fails(self, sequence: Sequence, *, num_needed: int) -> bool:
        """Return whether there is certainly no room yet, in O(1).

        The number of a sequence's cached blocks in use grows only if an idle block was shared, a
        block was forgotten and computed again, or the first missing block was computed.
        """
        assert isinstance(sequence.state, Queued)
        failure, device, pool = sequence.state.failure, self.device, self.pool
        if failure is None or failure.revision != device.revision:
            return False
        if failure.next_key is not None and device.find_block(failure.next_key) is not None:
            return False
        num_changes = pool.num_reused + device.num_forgotten - failure.num_changes
        return num_needed - failure.num_shared - num_changes > pool.num_free

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


class Refusal(Enum):
    """Why a sequence does not start."""

    IS_SAMPLED = auto()
    """A token of it is still being sampled."""
    NO_ROOM = auto()
    """Too few blocks are free."""
    AWAITS_DISK = auto()
    """Its blocks are read from the disk."""
    LOST = auto()
    """A block that was not swapped out is no longer cached: it is to be recomputed."""
    TOO_MANY_FORKS = auto()
    """The plan has as many forks as fit into its time."""


class Admitted(NamedTuple):
    """How a sequence starts once it has got its blocks."""

    awaits_copies: bool = False
    """Whether it must not run before its step is acknowledged, which copies cached blocks."""
    donor: Sequence | None = None
    """The sibling that it was forked from."""
    copies: AnySequence[BlockCopy] = ()
    """Copies on the device."""


class CopiedBlocks(NamedTuple):
    """The blocks of both pools that the plan of a step copies, in either direction."""

    step: int
    block_ids: list[int]
    cpu_block_ids: list[int]
