"""The blocks of sequences: block tables, prefixes in every tier, forks and swaps.

Methods that allocate blocks allocate all that they need or none. The manager computes the keys of a
sequence as far as look-ups need them. The scheduler decides when a sequence runs or is preempted.
"""

from __future__ import annotations

import math
import secrets
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.costs import TierPolicy
from cluster.scheduling.device_tier import DeviceTier, group_key
from cluster.scheduling.groups import NO_BLOCK, GroupTables
from cluster.scheduling.prefix_cache import CachedPrefix, PrefixCache
from cluster.scheduling.sequence import FailedAdmission, Queued, Sequence, Swapped
from cluster.scheduling.states import StateCopier
from cluster.scheduling.tiers import CpuTier, DiskTier
from pagedray.batch import BlockCopy

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.costs import SwapCosts
    from cluster.scheduling.device_tier import PromptKeys
    from pagedray.config import StepLimits
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
    windows: tuple[int | None, ...] = (None,)
    """The window of each group of layers, which have a block table each."""
    state_blocks: int = 0
    """Number of blocks of the recurrent state of a sequence; 0 without such states."""
    state_grid: int = 64
    """States are kept at multiples of this number of tokens and of the block size."""


class KvManager:
    """Owns the tiers of the prefix cache, and with them the pools."""

    __slots__ = (
        "_swaps",
        "block_size",
        "cpu",
        "cpu_pool",
        "device",
        "disk",
        "groups",
        "num_hit_tokens",
        "num_queried_tokens",
        "pool",
        "prefixes",
        "states",
    )

    def __init__(self, options: KvOptions, *, costs: SwapCosts | None, limits: StepLimits) -> None:
        """Without costs, every copy is worth its time. `limits` are limits of a step."""
        max_num_tokens = limits.max_num_batched_tokens
        self.block_size = options.block_size
        """Tokens per block."""
        self.groups = GroupTables(
            options.windows,
            block_size=self.block_size,
            step_tokens=max_num_tokens,
            num_state_blocks=options.state_blocks,
        )
        has_cpu_tier = options.enable_prefix_cache and options.enable_cpu_prefix_cache
        num_cpu_blocks = options.num_cpu_blocks
        self.cpu = CpuTier(
            num_cpu_blocks,
            policy=TierPolicy(
                costs,
                num_blocks=num_cpu_blocks,
                block_size=self.block_size,
                num_full=max(self.groups.num_full, 1),
            ),
            max_saved=-(-_SAVED_TOKENS * max_num_tokens // self.block_size) * self.groups.num_groups
            + options.state_blocks,
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
        grid = math.lcm(options.state_grid, self.block_size)
        self.prefixes = PrefixCache(
            self.groups, self.device, self.cpu, self.disk, block_size=self.block_size, grid=grid
        )
        self.states: StateCopier | None = None
        if options.state_blocks:
            self.states = StateCopier(
                self.device,
                self.prefixes,
                num_blocks=options.state_blocks,
                num_tokens=options.state_blocks * self.block_size // self.groups.num_groups,
                grid=grid,
                limits=limits,
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
        if self.states is not None:
            self.states.clear()
        self.device.clear()
        self.cpu.begin_epoch(is_kept=keeps_cpu_pool)
        if self.disk is not None:
            self.disk.clear()

    def hash_prompt(self, request: Request, prompt: array[int]) -> PromptKeys | None:
        """Return the keys of a long prompt, which take milliseconds; None if it is short.

        May be called from any thread.
        """
        if not self.device.is_enabled or len(prompt) < _MIN_HASHED_AHEAD:
            return None
        return self.device.hash_prompt(
            prompt, block_size=self.block_size, tenant=request.tenant, salt=request.cache_salt
        )

    def admit(
        self,
        sequence: Sequence,
        step: int,
        *,
        num_tokens: int,
        num_spare: int,
        may_wait: bool = False,
    ) -> Admitted | Refusal:
        """Give a waiting sequence blocks for `num_tokens`, cached blocks first.

        If it `may_wait`, it does not start before another has made the snapshot that it needs.

        At least `num_spare` blocks stay free. `num_computed` becomes the number of cached tokens;
        at least one known token is always left to compute. The plan of `step` has the copies that
        the sequence awaits.
        """
        if self.prefixes.awaits_disk(sequence, step):
            return Refusal.AWAITS_DISK
        num_needed = self.groups.blocks_for(num_tokens) + num_spare
        if self._still_fails(sequence, num_needed=num_needed):
            return Refusal.NO_ROOM
        num_shareable = self.prefixes.num_shareable(sequence)
        prefix = self.prefixes.find_blocks(sequence, num_shareable)
        if may_wait and self.states is not None:
            num_found = len(prefix.table) // self.groups.num_groups * self.block_size
            if self.states.is_awaited(sequence, num_found):
                return Refusal.AWAITS_STATE
        if not self._share_prefix(sequence, prefix, num_shareable, num_needed=num_needed):
            return Refusal.NO_ROOM
        if self.cpu.is_enabled and len(prefix.table) < num_shareable * self.groups.num_groups:
            prefix = self.prefixes.load_blocks(
                sequence, prefix, num_shareable, num_tokens=num_tokens, num_spare=num_spare
            )
        hits, state_ids = prefix
        num_cached = len(hits) // self.groups.num_groups
        sequence.num_computed = num_cached * self.block_size
        if self.device.is_enabled:
            self.num_queried_tokens += len(sequence.token_ids)
            self.num_hit_tokens += sequence.num_computed
        self._hold_blocks(
            sequence,
            hits,
            num_tokens=num_tokens,
            num_registered=num_cached,
            num_verified=self.device.num_verified(hits) // self.groups.num_groups,
        )
        if self.states is not None:
            self.states.admit(sequence, state_ids)
        return Admitted(awaits_copies=not self.device.arriving.isdisjoint((*hits, *state_ids)))

    def fork(
        self, sequence: Sequence, donor: Sequence, *, num_tokens: int, num_spare: int
    ) -> Admitted | Refusal:
        """Share a sibling's prompt with a sequence.

        The last prompt token is left to compute. Its block is written and hence a copy, unless
        that token is the first in it.
        """
        last_position = sequence.num_prompt_tokens - 1
        num_shared, num_groups = last_position // self.block_size, self.groups.num_groups
        num_dead = self.groups.num_dead(last_position)
        num_missing = self.groups.num_missing(num_tokens, num_entries=num_shared, num_dead=num_dead)
        if num_missing + num_spare > self.pool.num_free:
            return Refusal.NO_ROOM
        shared = donor.blocks.ids[: num_shared * num_groups]
        for group, dead in enumerate(num_dead):
            for entry in range(donor.blocks.num_dead[group], dead):
                shared[entry * num_groups + group] = NO_BLOCK
        self.pool.share_owned(self.groups.live_blocks(shared))
        targets = self.pool.allocate_all(num_groups)
        sequence.num_computed = last_position
        self._hold_blocks(
            sequence,
            [*shared, *targets],
            num_tokens=num_tokens,
            num_registered=num_shared,
            num_verified=min(donor.blocks.num_verified, num_shared),
        )
        sequence.blocks.num_known = donor.blocks.num_known
        sequence.blocks.keys = donor.blocks.keys[:num_shared]
        sequence.blocks.keys_revision = donor.blocks.keys_revision
        if last_position % self.block_size == 0:
            return Admitted(donor=donor)
        sources = donor.blocks.ids[len(shared) :]
        copies = [BlockCopy(*pair) for pair in zip(sources, targets, strict=False)]
        return Admitted(donor=donor, copies=copies)

    def find_donor(self, sequence: Sequence, step: int) -> Sequence | None:
        """Return a sibling that a sequence may be forked from in the plan of `step`, or None.

        The state of a sibling with the whole prompt is of no use for its last token.
        """
        if self.states is not None:
            return None
        if not self.groups.has_windows or not sequence.index:
            return sequence.find_donor(step)
        return sequence.find_donor(step, self.groups.num_dead(sequence.num_prompt_tokens - 1))

    def append(self, sequence: Sequence) -> list[int] | None:
        """Add an entry to a table and return its blocks, or None if too few are free."""
        if not self.groups.is_uniform:
            return self._append_entry(sequence)
        blocks = sequence.blocks
        if blocks.reserved_ids:
            block = blocks.reserved_ids.pop()
        elif self.pool.num_free:
            block = self.pool.allocate()
        else:
            return None
        blocks.ids.append(block)
        blocks.num_slots += self.block_size
        return [block]

    def _append_entry(self, sequence: Sequence) -> list[int] | None:
        """Do the same as `append` for several groups, or a window."""
        if self.reserve_entry(sequence) is None:
            return None
        blocks = sequence.blocks
        return blocks.extend(blocks.num_slots + 1, self.block_size, self.groups.num_groups)

    def reserve_entry(self, sequence: Sequence) -> list[int] | None:
        """Reserve the blocks of the next entry, or return None if too few are free.

        A prompt lacks blocks only if others share blocks behind its window.
        """
        if self.groups.has_windows:
            self._release_dead(sequence)
        blocks = sequence.blocks
        num_missing = max(0, self.groups.num_groups - len(blocks.reserved_ids))
        if num_missing > self.pool.num_free:
            return None
        blocks.reserved_ids += self.pool.allocate_all(num_missing)
        return blocks.reserved_ids

    def reserve_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of its next tokens a sequence has blocks for, at most `num_tokens`."""
        if not self.groups.has_windows:
            return num_tokens
        self._release_dead(sequence)
        blocks, num_groups = sequence.blocks, self.groups.num_groups
        num_added = -(-(sequence.num_computed + num_tokens - blocks.num_slots) // self.block_size)
        num_missing = num_added * num_groups - len(blocks.reserved_ids)
        if num_missing > 0:
            blocks.reserved_ids += self.pool.allocate_all(min(num_missing, self.pool.num_free))
        num_reserved = len(blocks.reserved_ids) // num_groups * self.block_size
        return min(num_tokens, blocks.num_slots + num_reserved - sequence.num_computed)

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, in both pools."""
        # The end of a prefix is useless without its beginning, so it is evicted first.
        self.pool.release_all(self.groups.live_blocks(sequence.blocks.ids))
        for block in sequence.blocks.reserved_ids:
            self.pool.release(block)
        if self.states is not None:
            self.states.release(sequence)
        if isinstance(sequence.state, Swapped):
            for block in self.groups.live_blocks(sequence.state.cpu_ids):
                self.cpu_pool.release(block)
            for block in sequence.state.state_ids:
                self.cpu_pool.release(block)
            sequence.state.cpu_ids = []
            sequence.state.state_ids = []
        sequence.drop_blocks()

    def num_shared(self, sequence: Sequence) -> int:
        """Return the leading entries with blocks that others own too, and that its keys find."""
        blocks, num_groups = sequence.blocks, self.groups.num_groups
        if blocks.keys_revision != self.device.revision:
            return 0
        num_entries = min(len(blocks.keys), len(blocks.ids) // num_groups)
        for place, block in enumerate(blocks.ids[: num_entries * num_groups]):
            index, group = divmod(place, num_groups)
            if block >= 0 and not (
                self.pool.is_shared(block)
                and self.device.find_block(group_key(blocks.keys[index], group)) == block
            ):
                return index
        return num_entries

    def num_unshared(self, sequence: Sequence, num_shared: int) -> int:
        """Return the blocks of a sequence from entry `num_shared` on."""
        blocks, num_groups = sequence.blocks, self.groups.num_groups
        return self.groups.num_live(
            num_entries=len(blocks.ids) // num_groups, first=num_shared, num_dead=blocks.num_dead
        )

    def keeps_released(self, sequence: Sequence) -> bool:
        """Return whether the CPU pool will keep the cached blocks of a sequence once evicted.

        Then there is no need to copy them before others need their place.
        """
        if not self.cpu.is_enabled or not self.cpu.policy.is_open:
            return False
        num_blocks = self.num_unshared(sequence, 0) + self.groups.num_state_blocks
        return self.cpu_pool.num_free - self.cpu_pool.num_idle >= num_blocks

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Return whether there is something to swap out, and the CPU pool has room for it."""
        if self.groups.has_windows:
            self._release_dead(sequence)
        table = self._swappable_blocks(sequence, self.num_shared(sequence))
        num_blocks = len(self.groups.live_blocks(table))
        return 0 < num_blocks <= self.cpu_pool.num_free - self.groups.num_state_blocks

    def _swappable_blocks(self, sequence: Sequence, num_shared: int) -> list[int]:
        """Return the entries from `num_shared` on, without entries that drafts alone need.

        There may be no room for these when the sequence is swapped in.
        """
        end = -(-sequence.length // self.block_size)
        num_groups = self.groups.num_groups
        return sequence.blocks.ids[num_shared * num_groups : end * num_groups].tolist()

    def swap_out(self, sequence: Sequence, step: int) -> tuple[Swapped, list[BlockCopy]]:
        """Move the blocks that others do not share to the CPU pool, in the plan of `step`.

        Returns the new state of the sequence, and the copies. The other blocks are looked up again
        when the sequence is swapped in.
        """
        num_shared = self.num_shared(sequence)
        table = self._swappable_blocks(sequence, num_shared)
        sources = self.groups.live_blocks(table)
        num_live = len(sources)
        live_state: list[int] = []
        if self.states is not None:
            loads = self.states.loads_of(sequence)
            sources = sources + loads
            if not loads:
                live_state = self.cpu_pool.allocate_all(self.states.num_blocks)
                self.states.evict_live(sequence, live_state)
                # Anything may overwrite the live state at once.
                self._pin_copied(step, [], live_state)
        targets = self.cpu_pool.allocate_all(len(sources))
        self._pin_copied(step, sources, targets)
        self.release(sequence)
        swapped = Swapped(
            cpu_ids=_filled(table, targets[:num_live]),
            num_unswapped=num_shared,
            ready_step=step,
            state_ids=targets[num_live:] + live_state,
        )
        return swapped, [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]

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
        num_needed = self.groups.blocks_for(num_tokens) + num_spare
        if self._still_fails(sequence, num_needed=num_needed):
            return Refusal.NO_ROOM
        num_shareable = self.prefixes.num_shareable(sequence)
        num_groups = self.groups.num_groups
        hits = self.prefixes.find_swapped(sequence, num_shareable)
        if len(hits) < swapped.num_unswapped * num_groups:
            self.release(sequence)
            return Refusal.LOST
        prefix = CachedPrefix(hits, [])
        if not self._share_prefix(sequence, prefix, num_shareable, num_needed=num_needed):
            return Refusal.NO_ROOM
        table = swapped.cpu_ids[len(hits) - swapped.num_unswapped * num_groups :]
        sources = self.groups.live_blocks(table)
        num_live = len(sources)
        sources = [*sources, *swapped.state_ids]
        targets = self.pool.allocate_all(len(sources))
        self._pin_copied(step, targets, sources)
        num_registered = len(hits) // num_groups
        num_verified = self.device.num_verified(hits) // num_groups
        if num_verified == num_registered or num_verified > sequence.blocks.num_verified:
            num_verified = sequence.blocks.num_verified
        self.release(sequence)
        self._hold_blocks(
            sequence,
            hits + _filled(table, targets[:num_live]),
            num_tokens=num_tokens,
            num_registered=num_registered,
            num_verified=num_verified,
        )
        if self.states is not None:
            self.states.resume(sequence, targets[num_live:])
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]

    def _pin_copied(self, step: int, block_ids: list[int], cpu_block_ids: list[int]) -> None:
        """Keep blocks that the plan of `step` copies until the step is acknowledged."""
        for block in block_ids:
            self.pool.pin(block)
        for block in cpu_block_ids:
            self.cpu_pool.pin(block)
        self._swaps.append(CopiedBlocks(step, block_ids, cpu_block_ids))

    def num_lacking(self, sequence: Sequence, *, num_tokens: int, num_spare: int) -> int:
        """Return how many blocks a queued sequence lacks, beyond free blocks and transit."""
        assert isinstance(sequence.state, Queued)
        num_needed = self.groups.blocks_for(num_tokens) + num_spare
        failure = sequence.state.failure
        if failure is not None:
            num_needed -= failure.num_shared
        return num_needed - self.pool.num_free - self.pool.num_in_transit

    def num_owned_alone(self, sequence: Sequence) -> int:
        """Return the blocks of a running sequence that no other sequence owns, in O(log n).

        An estimate: it holds if the blocks behind the first such block are such blocks too.
        """
        blocks, is_shared = sequence.blocks, self.pool.is_shared
        num_groups = self.groups.num_groups
        num_shared = bisect_left(
            range(len(blocks.ids) // num_groups),
            True,
            lo=blocks.num_dead[0],
            key=lambda index: not is_shared(blocks.ids[index * num_groups]),
        )
        return self.num_unshared(sequence, num_shared) + len(blocks.reserved_ids)

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
        evictions = self.cpu.take_copies(step) if self.cpu.is_enabled else []
        if self.states is not None:
            evictions += self.states.take_evictions()
        return evictions, loads

    def _hold_blocks(
        self,
        sequence: Sequence,
        table: list[int],
        *,
        num_tokens: int,
        num_registered: int,
        num_verified: int,
    ) -> None:
        """Begin a table of owned blocks, and reserve blocks for `num_tokens`."""
        num_dead = self.groups.num_dead(sequence.num_computed)
        num_entries = len(table) // self.groups.num_groups
        num_missing = self.groups.num_missing(
            num_tokens, num_entries=num_entries, num_dead=num_dead
        )
        sequence.hold_blocks(
            table,
            self.pool.allocate_all(num_missing),
            block_size=self.block_size,
            num_groups=self.groups.num_groups,
            num_registered=num_registered if self.device.is_enabled else None,
            num_verified=num_verified,
        )
        sequence.blocks.num_dead = num_dead
        sequence.blocks.num_wanted = -(-num_tokens // self.block_size)

    def _release_dead(self, sequence: Sequence) -> None:
        """Release the blocks that neither the next query nor a later query sees.

        As many are reserved again if the sequence started with blocks for more tokens.
        """
        blocks, num_groups = sequence.blocks, self.groups.num_groups
        if sequence.has_sampled:
            # The blocks may stay cached in the CPU pool.
            self.prefixes.mark_verified(sequence)
        num_released, size = 0, self.block_size
        ends = blocks.num_known, sequence.num_prompt_tokens // size
        likely = [(self.groups.num_dead(end * size), end) for end in ends]
        # A snapshot of a state may need any of the others.
        drops_unlikely = self.groups.num_full and self.states is None
        for group, dead in enumerate(self.groups.num_dead(sequence.num_computed)):
            for index in range(blocks.num_dead[group], dead):
                place = index * num_groups + group
                block, blocks.ids[place] = blocks.ids[place], NO_BLOCK
                if drops_unlikely and not any(first[group] <= index < end for first, end in likely):
                    self.device.release_unlikely(block)
                    num_released += 1
                    continue
                key = self.device.unverified_key(block)
                if key is not None:
                    blocks.unverified.append((block, key))
                self.pool.release(block)
                num_released += 1
            blocks.num_dead[group] = max(dead, blocks.num_dead[group])
        num_wanted = blocks.num_wanted * num_groups - len(blocks.ids) - len(blocks.reserved_ids)
        num_reserved = min(num_released, num_wanted, self.pool.num_free)
        blocks.reserved_ids += self.pool.allocate_all(max(0, num_reserved))

    def _share_prefix(
        self, sequence: Sequence, prefix: CachedPrefix, num_shareable: int, *, num_needed: int
    ) -> bool:
        """Own the blocks of a prefix if there is room for `num_needed` with them.

        Otherwise note the failure, and return False.
        """
        assert isinstance(sequence.state, Queued)
        hits = prefix.table
        live = self.groups.live_blocks(hits) + prefix.state_ids
        num_shared = self.pool.num_in_use(live)
        if num_needed - num_shared <= self.pool.num_free:
            self.pool.share_all(live)
            return True
        num_found, next_key, num_more = len(hits) // self.groups.num_groups, None, 0
        if self.states is not None or not self.groups.is_uniform:
            num_more = self.groups.num_seen(num_found, num_shareable)
        elif num_found < min(num_shareable, len(sequence.blocks.keys)):
            next_key = sequence.blocks.keys[num_found]
        sequence.state.failure = FailedAdmission(
            next_key,
            num_shared,
            self.pool.num_reused + self.device.num_forgotten,
            self.device.revision,
            num_more,
        )
        return False

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
        num_shared = failure.num_shared + failure.num_more + num_changes
        return num_needed - num_shared > pool.num_free


class Refusal(Enum):
    """Why a sequence does not start."""

    IS_SAMPLED = auto()
    """A token of it is still being sampled."""
    AWAITS_MASK = auto()
    """The mask of its next token is not made."""
    AWAITS_STATE = auto()
    """Another sequence is about to make a snapshot that the sequence needs."""
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


def _filled(table: list[int], blocks: list[int]) -> list[int]:
    """Return a table with other blocks, in their order, in place of its blocks."""
    others = iter(blocks)
    return [block if block < 0 else next(others) for block in table]


class CopiedBlocks(NamedTuple):
    """The blocks of both pools that the plan of a step copies, in either direction."""

    step: int
    block_ids: list[int]
    cpu_block_ids: list[int]
