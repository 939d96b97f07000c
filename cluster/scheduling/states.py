"""Recurrent states: copies between the live states of rows and snapshots in the block pool.

A state is what all recurrent layers keep of a sequence, padded to whole blocks. The live state of a
row has a fixed place behind the blocks of the pool, and holds exactly the tokens that the row has
computed. A snapshot is a state after the first `p` tokens of a sequence, in blocks of the pool. Its
parts have keys that follow from the key of the last block before `p`, so that tiers keep, evict and
find them like other blocks. A prefix of `p` tokens is found only if its snapshot is.

Snapshots are sparse: a prompt has some at its anchors, where a cached prefix went on without a
snapshot, and at long distances. A running sequence keeps its last one, which the next replaces.
A plan copies before its forward pass: a snapshot is copied from the live state when the next token
to compute is at `p`, and a live state from a snapshot when a sequence computes its first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.sequence import Sequence, SequenceStates
from pagedray.batch import BlockCopy

if TYPE_CHECKING:
    from cluster.scheduling.device_tier import DeviceTier
    from cluster.scheduling.prefix_cache import PrefixCache

__all__ = ["Save", "StateCopier"]

_GRIDS_PER_DECODE = 2
"""Distance of the snapshots of decodes, in units of the grid."""
_GRIDS_PER_PROMPT = 128
"""The most distance of the snapshots of a prompt, in units of the grid."""


class Save(NamedTuple):
    """A snapshot that the plan being made is to copy if blocks are free."""

    sequence: Sequence
    position: int
    is_decode: bool


class StateCopier:
    """Plans the copies of states on the device, and which positions have snapshots."""

    __slots__ = (
        "_copies",
        "_device",
        "_evictions",
        "_first_live",
        "_grid",
        "_held",
        "_prefixes",
        "num_blocks",
        "num_loaded",
        "num_saved",
        "num_skipped",
        "num_unreused_tokens",
        "saves",
    )

    def __init__(
        self, device: DeviceTier, prefixes: PrefixCache, *, num_blocks: int, grid: int
    ) -> None:
        """A state has `num_blocks`; `grid` is a multiple of the block size."""
        self._device = device
        self._prefixes = prefixes
        self._grid = grid
        self._first_live = device.pool.num_blocks
        self.num_blocks = num_blocks
        """Blocks of a state."""
        self._copies: list[BlockCopy] = []
        """Copies on the device in the plan that is being made."""
        self._evictions: list[BlockCopy] = []
        """Copies of the live states of preempted sequences to the CPU pool in that plan."""
        self.saves: list[Save] = []
        """Snapshots to make in that plan, once it has all its sequences."""
        self._held: list[int] = []
        """Blocks that these copies read or write, which are released with the plan."""
        self.num_saved = self.num_loaded = 0
        """Snapshots that were made, and that were found and reused."""
        self.num_skipped = 0
        """Snapshots that were not made, since too few blocks were free."""
        self.num_unreused_tokens = 0
        """Cached tokens behind the last snapshot that was found, which were computed again."""

    def clear(self) -> None:
        """Forget the plan that is being made."""
        self._copies, self._evictions, self.saves, self._held = [], [], [], []

    def admit(self, sequence: Sequence, load_ids: list[int]) -> None:
        """Begin a sequence with a cached prefix, and the blocks of the state after it."""
        if load_ids:
            self.num_loaded += 1
        self.num_unreused_tokens += self._num_known(sequence) - sequence.num_computed
        self.resume(sequence, load_ids)

    def resume(self, sequence: Sequence, load_ids: list[int]) -> None:
        """Do the same for a sequence that comes back from the CPU pool."""
        wanted = self._wanted(sequence) if self._device.is_enabled else []
        sequence.blocks.states = SequenceStates(load_ids, wanted)

    def release(self, sequence: Sequence) -> None:
        """Release the blocks of a state that was not copied to its row yet."""
        states = sequence.blocks.states
        for block in () if states is None else states.load_ids:
            self._device.pool.release(block)

    def loads_of(self, sequence: Sequence) -> list[int]:
        """Return the blocks of a state that was not copied to its row yet, if any."""
        states = sequence.blocks.states
        return [] if states is None else states.load_ids

    def evict_live(self, sequence: Sequence, targets: list[int]) -> None:
        """Copy the live state of a sequence that loses its row to blocks of the CPU pool."""
        self._evictions += self._copies_between(self._live_blocks(sequence), targets)

    def take_evictions(self) -> list[BlockCopy]:
        """Return the copies of live states for the plan that is being made."""
        evictions, self._evictions = self._evictions, []
        return evictions

    def begin_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Prepare the next tokens of a prompt; return how many to compute, at most `num_tokens`.

        A chunk ends at the next position of a snapshot, or on the grid, so that the bits of states
        do not depend on the budget.
        """
        self._begin_tokens(sequence)
        states, first = sequence.blocks.states, sequence.num_computed
        assert states is not None
        end = first + num_tokens
        if states.wanted and states.wanted[-1] < end:
            return states.wanted[-1] - first
        on_grid = end // self._grid * self._grid
        return num_tokens if end == sequence.prefill_end or on_grid <= first else on_grid - first

    def begin_decode(self, sequence: Sequence) -> None:
        """Prepare the next token of a running sequence, and when it is examined again."""
        interval, position = _GRIDS_PER_DECODE * self._grid, sequence.num_computed
        is_due = self._device.is_enabled and position % interval == 0
        if not self._begin_tokens(sequence) and is_due:
            self.saves.append(Save(sequence, position, is_decode=True))
        next_position = (position // interval + 1) * interval
        sequence.unchecked_until = min(sequence.unchecked_until, next_position)

    def _begin_tokens(self, sequence: Sequence) -> bool:
        """Copy the state of a sequence to or from its row if that is due before its next tokens.

        Returns whether it is.
        """
        states, position = sequence.blocks.states, sequence.num_computed
        assert states is not None
        is_wanted, wanted = False, states.wanted
        while wanted and wanted[-1] <= position:
            is_wanted = wanted.pop() == position
        if states.load_ids:
            self._load(sequence, states)
        elif is_wanted:
            self.saves.append(Save(sequence, position, is_decode=False))
        else:
            return False
        return True

    def make_snapshot(self, save: Save) -> None:
        """Copy the live state of a sequence to a snapshot, unless it exists or finds no room.

        Nothing else in the plan may need blocks afterwards.
        """
        sequence, device, states = save.sequence, self._device, save.sequence.blocks.states
        # At most one plan is in flight, which samples the next token.
        assert states is not None
        assert save.position <= len(sequence.token_ids)
        if save.is_decode:
            self._forget_last(states)
        keys = list(self._prefixes.state_keys(sequence, save.position))
        parts = [part for part, key in enumerate(keys) if device.find_block(key) is None]
        if not parts:
            return
        if len(parts) > device.pool.num_free:
            self.num_skipped += 1
            return
        blocks, live = device.pool.allocate_all(len(parts)), self._live_blocks(sequence)
        for part, block in zip(parts, blocks, strict=True):
            device.add_block(keys[part], block)
            sequence.blocks.unverified.append((block, keys[part]))
            if save.is_decode:
                states.last_decoded.append((block, keys[part]))
        self._copies += self._copies_between([live[part] for part in parts], blocks)
        self._held += blocks
        self.num_saved += 1
        # The next token verifies it.
        sequence.recheck_at = 0

    def end_draft(self) -> list[BlockCopy]:
        """Return the copies on the device for the plan that was drafted."""
        # The first part is evicted first, and looked up first.
        for block in self._held:
            self._device.pool.release(block)
        copies = self._copies
        self._copies, self.saves, self._held = [], [], []
        return copies

    def _load(self, sequence: Sequence, states: SequenceStates) -> None:
        """Copy a snapshot to the live state of a sequence."""
        self._copies += self._copies_between(states.load_ids, self._live_blocks(sequence))
        for block in states.load_ids:
            key = self._device.unverified_key(block)
            if key is not None:
                sequence.blocks.unverified.append((block, key))
        self._held += states.load_ids
        states.load_ids = []

    def _forget_last(self, states: SequenceStates) -> None:
        """Free the last snapshot of a decoding sequence, which the next replaces."""
        for block, key in states.last_decoded:
            if self._device.find_block(key) == block:
                self._device.forget_block(block)
        states.last_decoded = []

    def _num_known(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence had cached blocks, with or without their state."""
        return max(sequence.blocks.num_known * self._prefixes.block_size, sequence.num_computed)

    def _wanted(self, sequence: Sequence) -> list[int]:
        """Return the positions at which the rest of a prompt gets snapshots, the last first."""
        grid, first = self._grid, sequence.num_computed
        request, num_tokens = sequence.active.request, sequence.num_prompt_tokens
        lengths = {min(length, num_tokens) for length in request.anchors or (num_tokens - 1,)}
        if request.sampling.n > 1:
            lengths.add(num_tokens - 1)
        lengths.add(self._num_known(sequence))
        found, last = list[int](), first // grid * grid
        for position in sorted({length // grid * grid for length in lengths}):
            if position > first:
                found += self._between(last, position)
                found.append(position)
                last = position
        found += self._between(last, sequence.prefill_end)
        return found[::-1]

    def _between(self, first: int, end: int) -> range:
        """Return the positions of snapshots between two others that are far apart."""
        interval = _GRIDS_PER_PROMPT * self._grid
        return range(first + interval, end, interval)

    def _live_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks of the live state of a sequence with a row."""
        first = self._first_live + sequence.state.row * self.num_blocks
        return list(range(first, first + self.num_blocks))

    def _copies_between(self, sources: list[int], targets: list[int]) -> list[BlockCopy]:
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]
