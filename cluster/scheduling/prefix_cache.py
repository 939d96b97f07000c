"""The prefixes of sequences in every tier: finds, copies to the tier above, adds and forgets them.

A prefix needs the blocks that the query behind it sees: in a group without a window all, in a
window group the last. In models with recurrent states, it also needs the state after its last
token. The keys of a sequence are computed as far as look-ups need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.device_tier import group_key, state_key
from cluster.scheduling.groups import NO_BLOCK
from cluster.scheduling.sequence import DiskRead, Sequence, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.device_tier import BlockKey, DeviceTier
    from cluster.scheduling.groups import GroupTables
    from cluster.scheduling.tiers import CpuTier, DiskTier

__all__ = ["CachedPrefix", "PrefixCache"]


class CachedPrefix(NamedTuple):
    """The blocks of a prefix on the device."""

    table: list[int]
    state_ids: list[int]
    """Blocks of the recurrent state after the tokens, if any layer has a state."""


class PrefixCache:
    """Looks sequences up in the tiers of the prefix cache, and adds their blocks."""

    __slots__ = (
        "_cpu",
        "_device",
        "_disk",
        "_grid_entries",
        "_groups",
        "_num_state_blocks",
        "block_size",
    )

    def __init__(
        self,
        groups: GroupTables,
        device: DeviceTier,
        cpu: CpuTier,
        disk: DiskTier | None,
        *,
        block_size: int,
        grid: int,
    ) -> None:
        """Recurrent states, if there are any, are kept at multiples of `grid` only."""
        self._groups = groups
        self._device = device
        self._cpu = cpu
        self._disk = disk
        self.block_size = block_size
        """Tokens per block."""
        self._num_state_blocks = groups.num_state_blocks
        self._grid_entries = grid // block_size

    def find_blocks(self, sequence: Sequence, num_shareable: int) -> CachedPrefix:
        """Return the longest prefix of a sequence that is cached on the device."""
        groups = self._groups
        hits = self._find_chain(sequence, num_shareable)
        if groups.is_uniform and not self._num_state_blocks:
            return CachedPrefix(hits, [])
        known = len(hits) if groups.num_full else num_shareable
        while known < num_shareable and self._has(self.key_at(sequence, known)):
            known += 1
        sequence.blocks.num_known = known
        end = self._longest_prefix(
            sequence,
            len(hits) if groups.num_full else num_shareable,
            lambda key: self._device.find_block(key) is not None,
            first=len(hits) if groups.num_full == 1 else 0,
        )
        num_dead = groups.num_dead(end * self.block_size)
        table = self._device_table(sequence, hits, end, num_dead)
        keys = self.state_keys(sequence, end * self.block_size)
        state_ids = [block for key in keys if (block := self._device.find_block(key)) is not None]
        return CachedPrefix(table, state_ids)

    def state_keys(self, sequence: Sequence, num_tokens: int) -> Iterator[BlockKey]:
        """Yield the keys of the recurrent state after the first tokens, which fill blocks."""
        if not self._num_state_blocks or not num_tokens:
            return
        num_entries = num_tokens // self.block_size
        for index in range(len(sequence.blocks.keys), num_entries):
            self.key_at(sequence, index)
        for part in range(self._num_state_blocks):
            yield state_key(sequence.blocks.keys[num_entries - 1], part)

    def _longest_prefix(
        self, sequence: Sequence, most: int, has: Callable[[BlockKey], bool], *, first: int
    ) -> int:
        """Return the entries of the longest prefix of which `has` returns that its keys are there.

        The first entries have their blocks in groups without a window.
        """
        groups, size = self._groups, self.block_size

        def has_place(index: int, group: int) -> bool:
            return has(self.key_at(sequence, index, group))

        end = groups.longest_prefix(most, has_place, first=first)
        if not self._num_state_blocks:
            return end
        while True:
            most = end // self._grid_entries * self._grid_entries
            while most and not all(map(has, self.state_keys(sequence, most * size))):
                most -= self._grid_entries
            if most == end or not groups.has_windows:
                return most
            end = groups.longest_prefix(most, has_place, first=min(first, most))

    def find_swapped(self, sequence: Sequence, num_shareable: int) -> list[int]:
        """Return the table of the leading blocks of a swapped sequence that are cached."""
        # A sequence writes to no block of computed tokens.
        most = min(num_shareable, sequence.num_computed // self.block_size)
        hits = self._find_chain(sequence, most)
        if self._groups.is_uniform:
            return hits
        most = len(hits) if self._groups.num_full else most
        num_dead = self._groups.num_dead(sequence.num_computed)
        return self._device_table(sequence, hits, most, num_dead)

    def _device_table(
        self, sequence: Sequence, hits: list[int], num_entries: int, num_dead: AnySequence[int]
    ) -> list[int]:
        """Return the table of cached blocks, up to an entry that is not cached.

        `hits` are the blocks of the first group, if queries see all tokens in it.
        """
        num_groups, first_group = self._groups.num_groups, 0
        table = [NO_BLOCK] * (num_entries * num_groups)
        if self._groups.num_full:
            table[::num_groups] = hits[:num_entries]
            first_group = 1
        for group in range(first_group, num_groups):
            for index in range(num_dead[group], num_entries):
                block = self._device.find_block(self.key_at(sequence, index, group))
                if block is None:
                    num_entries = index
                    break
                table[index * num_groups + group] = block
        return table[: num_entries * num_groups]

    def _find_chain(self, sequence: Sequence, num_shareable: int) -> list[int]:
        """Return the leading blocks of the first group that are cached on the device.

        The keys of a sequence are of the device's revision from then on.
        """
        blocks, device = sequence.blocks, self._device
        if blocks.keys_revision != device.revision:
            blocks.keys = []
            blocks.keys_revision = device.revision
        request = sequence.active.request
        hits = device.find_prefix(
            blocks.keys,
            b"" if blocks.keys else device.root(request.tenant, request.cache_salt),
            sequence.token_ids,
            num_blocks=num_shareable,
            block_size=self.block_size,
        )
        if not self._groups.num_full:
            # A prefix need not have its first blocks.
            for index in range(len(blocks.keys), num_shareable):
                self.key_at(sequence, index)
        return hits

    def load_blocks(
        self,
        sequence: Sequence,
        prefix: CachedPrefix,
        num_shareable: int,
        *,
        num_tokens: int,
        num_spare: int,
    ) -> CachedPrefix:
        """Copy blocks from the CPU pool for a longer prefix, and return that.

        `prefix` is owned. None are copied if they are better computed.
        """
        cpu, device, groups, hits = self._cpu, self._device, self._groups, prefix.table
        first = len(hits) // groups.num_groups
        end = counted = self._longest_prefix(sequence, num_shareable, self._has, first=first)
        while counted < num_shareable and cpu.policy.note_lookup(
            self.key_at(sequence, counted).digest
        ):
            counted += 1
        if end <= first:
            return prefix
        num_dead = groups.num_dead(end * self.block_size)
        table = hits + [NO_BLOCK] * ((end - first) * groups.num_groups)
        wanted = [
            (index * groups.num_groups + group, self.key_at(sequence, index, group))
            for index in range(first, end)
            for group, dead in enumerate(num_dead)
            if index >= dead
        ]
        # The state follows behind the table.
        num_places = len(table)
        wanted += enumerate(self.state_keys(sequence, end * self.block_size), num_places)
        table += [NO_BLOCK] * self._num_state_blocks
        places, sources, shared, keys = [], [], [], []
        for place, key in wanted:
            block = device.find_block(key)
            if block is None:
                source = cpu.find_block(key)
                assert source is not None
                places.append(place)
                sources.append(source)
                keys.append(key)
            else:
                table[place] = block
                shared.append(block)
        num_missing = groups.num_missing(num_tokens, num_entries=end, num_dead=num_dead)
        num_needed = len(sources) + len(shared) - self._device.pool.num_in_use(shared) + num_missing
        if num_needed + num_spare > self._device.pool.num_free or not cpu.policy.is_restored(
            len(sources), first=first, end=end
        ):
            return prefix
        self._device.pool.share_all(shared)
        for block in prefix.state_ids:
            self._device.pool.release(block)
        for group, dead in enumerate(num_dead):
            for place in range(group, min(dead, first) * groups.num_groups, groups.num_groups):
                if table[place] != NO_BLOCK:
                    self._device.pool.release(table[place])
                    table[place] = NO_BLOCK
        # The device blocks for the copies may be evicted to the CPU pool.
        entries = {place // groups.num_groups for place in places if place < num_places}
        cpu.begin_loads(sources, num_entries=len(entries))
        for place, block in zip(places, device.load_blocks(keys, sources), strict=True):
            table[place] = block
        return CachedPrefix(table[:num_places], table[num_places:])

    def _has(self, key: BlockKey) -> bool:
        """Return whether the CPU pool or the device has the block with a key."""
        return self._cpu.find_block(key) is not None or self._device.find_block(key) is not None

    def awaits_disk(self, sequence: Sequence, step: int) -> bool:
        """Return whether a sequence should wait for blocks on the disk before it starts.

        The plan of `step` reads them. A sequence waits for the disk only once, even if its blocks
        are lost meanwhile, so that it starts eventually.
        """
        if self._disk is None:
            return False
        waiting = sequence.state
        assert isinstance(waiting, Waiting)
        if waiting.disk_read is None:
            waiting.disk_read = self._begin_disk_read(sequence, self._disk, step)
        read_step = waiting.disk_read.step
        return read_step is not None and read_step > self._disk.read_step

    def _begin_disk_read(self, sequence: Sequence, disk: DiskTier, step: int) -> DiskRead:
        """Read the blocks that are better read from the disk than computed, in the plan of `step`.

        Returns the last step that reads blocks that the sequence needs.
        """
        cpu, device, groups = self._cpu, self._device, self._groups
        num_shareable = self.num_shareable(sequence)
        first = len(self.find_blocks(sequence, num_shareable).table) // groups.num_groups

        def has(key: BlockKey) -> bool:
            return (
                device.find_block(key) is not None
                or disk.step_of_read(key) is not None
                or cpu.find_block(key) is not None
                or (disk.find_block(key) is not None and not cpu.has_key(key))
            )

        end = self._longest_prefix(sequence, num_shareable, has, first=first)
        num_dead = groups.num_dead(end * self.block_size)
        wanted = [
            (index, self.key_at(sequence, index, group))
            for index in range(first, end)
            for group, dead in enumerate(num_dead)
            if index >= dead
        ]
        if end > first:
            wanted += ((end - 1, key) for key in self.state_keys(sequence, end * self.block_size))
        keys: list[BlockKey] = []
        entries: list[int] = []
        num_kept, last_step = 0, None
        for index, key in wanted:
            if device.find_block(key) is not None:
                continue
            read_step = disk.step_of_read(key)
            if read_step is not None:
                last_step = read_step if last_step is None else max(last_step, read_step)
            elif cpu.find_block(key) is not None:
                # Blocks that are read must not take its place.
                cpu.touch_key(key)
                num_kept += 1
            else:
                keys.append(key)
                entries.append(index)
        num_readable = disk.num_readable(num_kept)
        # Without all blocks of its windows and its state, no longer prefix is found.
        is_whole = groups.has_windows or self._num_state_blocks > 0
        del keys[0 if is_whole and len(keys) > num_readable else num_readable :]
        if not keys or not cpu.policy.is_read(
            len(keys),
            num_reading=disk.num_reading,
            first=entries[0],
            num_entries=len(set(entries[: len(keys)])),
        ):
            return DiskRead(last_step)
        disk.read_blocks(keys, step)
        return DiskRead(step)

    def register_blocks(self, sequence: Sequence) -> None:
        """Add blocks that are full of known, computed tokens to the prefix cache."""
        device = self._device
        if not device.is_enabled:
            return
        num_tokens = len(sequence.token_ids)
        if num_tokens > sequence.num_computed:
            num_tokens = sequence.num_computed
        blocks = sequence.blocks
        num_full, index = num_tokens // self.block_size, blocks.num_registered
        is_uniform = self._groups.is_uniform
        while index < num_full:
            if not is_uniform:
                self._register_entry(sequence, index)
            elif device.add_block(self.key_at(sequence, index), blocks.ids[index]) and (
                index < blocks.num_verified
            ):
                device.mark_verified((blocks.ids[index],))
            index += 1
        sequence.note_registered(index, self.block_size)

    def _register_entry(self, sequence: Sequence, index: int) -> None:
        """Add the blocks of an entry to the prefix cache, except blocks that were released."""
        num_groups, blocks = self._groups.num_groups, sequence.blocks
        key = self.key_at(sequence, index)
        for group, block in enumerate(blocks.ids[index * num_groups : (index + 1) * num_groups]):
            is_added = block >= 0 and self._device.add_block(group_key(key, group), block)
            if is_added and index < blocks.num_verified:
                self._device.mark_verified((block,))

    def take_back(self, sequence: Sequence) -> None:
        """Mark the last known token as not computed, so that a later plan computes it again.

        Its block must not have been shared since it was computed, and is not shared until then.
        """
        # A recurrent state cannot lose a token.
        assert not self._num_state_blocks
        sequence.num_computed -= 1
        blocks, index = sequence.blocks, sequence.num_computed // self.block_size
        if index >= blocks.num_registered:
            return
        num_groups = self._groups.num_groups
        entry = blocks.ids[index * num_groups : (index + 1) * num_groups]
        for group, block in enumerate(entry):
            if self._device.find_block(group_key(blocks.keys[index], group)) == block:
                self._device.forget_block(block)
        sequence.note_registered(index, self.block_size)

    def mark_verified(self, sequence: Sequence) -> None:
        """Record that the logits that gave a sequence its last token were finite."""
        blocks = sequence.blocks
        if blocks.unverified:
            self._device.mark_released(blocks.unverified)
            blocks.unverified = []
        if blocks.num_verified >= blocks.num_registered:
            return
        num_full = (len(sequence.token_ids) - 1) // self.block_size
        num_groups, end = self._groups.num_groups, min(num_full, blocks.num_registered)
        verified = blocks.ids[blocks.num_verified * num_groups : end * num_groups]
        self._device.mark_verified(verified)
        blocks.num_verified += len(verified) // num_groups

    def forget_blocks(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from every tier, because its logits were not finite.

        Look up blocks by key: the sequence may have released them. Blocks that other sequences
        computed on top of unverified blocks are not found any more either.
        """
        keys, first = sequence.blocks.keys, sequence.blocks.num_verified
        every_group = range(self._groups.num_groups)
        found = [group_key(key, group) for key in keys for group in every_group]
        if self._num_state_blocks:
            for num_entries in range(self._grid_entries, len(keys) + 1, self._grid_entries):
                if self._has_state(keys[num_entries - 1]):
                    found += self.state_keys(sequence, num_entries * self.block_size)
        for key in found:
            self._cpu.forget_key(key)
            if self._disk is not None:
                self._disk.forget_key(key)
            block = self._device.find_block(key)
            if block is not None:
                self._device.forget_block(block)
        if first < len(keys):
            self._device.invalidate_key(self.parent_of(sequence, first), keys[first])

    def _has_state(self, key: BlockKey) -> bool:
        """Return whether a tier has the first or the last part of the state behind a block."""
        return any(
            self._device.find_block(one) is not None
            or self._cpu.has_key(one)
            or (self._disk is not None and self._disk.has_key(one))
            for one in (state_key(key, 0), state_key(key, self._num_state_blocks - 1))
        )

    def num_shareable(self, sequence: Sequence) -> int:
        """Return the blocks of known tokens that may be shared: one token is left to compute.

        None are shareable while log-probabilities of the prompt are to be computed.
        """
        if not self._device.is_enabled:
            return 0
        if sequence.index == 0 and sequence.active.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self.block_size

    def key_at(self, sequence: Sequence, index: int, group: int = 0) -> BlockKey:
        """Return the key of the block of entry `index` in a group, after its predecessors' keys."""
        keys = sequence.blocks.keys
        if index == len(keys):
            first = index * self.block_size
            tokens = sequence.token_ids[first : first + self.block_size]
            parent = keys[-1].digest if keys else self.parent_of(sequence, 0)
            keys.append(self._device.key_after(parent, tokens))
        return group_key(keys[index], group) if group else keys[index]

    def parent_of(self, sequence: Sequence, index: int) -> bytes:
        """Return the digest before the digest of block `index`."""
        if index:
            return sequence.blocks.keys[index - 1].digest
        request = sequence.active.request
        return self._device.root(request.tenant, request.cache_salt)
