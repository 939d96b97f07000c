"""Recurrent states: copies between the live states of rows and snapshots in the block pool.

A state is what all recurrent layers keep of a sequence, padded to whole blocks. The live state of a
row has a fixed place behind the blocks of the pool, and holds exactly the tokens that the row has
computed. A snapshot is a state after the first `p` tokens of a sequence, in blocks of the pool. Its
parts have keys that follow from the key of the last block before `p`, so that tiers keep, evict and
find them like other blocks. A prefix of `p` tokens is found only if its snapshot is.

Snapshots are sparse: a prompt has some at its anchors, where a cached prefix went on without a
snapshot, and at long distances. A running sequence keeps its last one, which the next replaces.
A turn of a conversation continues the end of the turn before, either of its prompt or of its
output; the one that was found tells which end the next turn needs, and it is evicted first once the
turn has a snapshot of its own.
A plan copies before its forward pass: a live state from a snapshot when a sequence computes its
first token, and a snapshot from the live state when a running sequence is to compute its token at
`p`. Snapshots of prompts are copied after the forward pass that computes the tokens before `p`:
from the live state if a chunk ends at `p`, and from a spare state if it goes on. Of a chain of
drafts, only the accepted tokens advance the live state, before the output of the step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.device_tier import BlockKey
from cluster.scheduling.sequence import Sequence, Waiting
from cluster.scheduling.sequence_blocks import SequenceStates
from pagedray.batch import BlockCopy, StateSave

if TYPE_CHECKING:
    from cluster.scheduling.device_tier import DeviceTier
    from cluster.scheduling.prefix_cache import PrefixCache
    from pagedray.config import StepLimits

__all__ = ["StateCopier"]

_GRIDS_PER_DECODE = 2
"""Distance of the snapshots of decodes, in units of the grid."""
_GRIDS_PER_PROMPT = 128
"""The most distance of the snapshots of a prompt, in units of the grid."""
_LEAST_PART = 16
"""A snapshot saves at least a 16th of the tokens that its blocks would have room for."""
_MOST_WAITS = 16
"""The most steps for which a sequence waits for a snapshot that another is about to make."""
_MOST_TURNS = 4096
"""Snapshots of turns that are remembered."""


class SnapshotKind(Enum):
    """The purpose of a snapshot."""

    PROMPT = auto()
    """The end of a prompt, for a next turn that does not repeat the output."""
    DECODE = auto()
    """The end of the output, for a next turn that repeats the output."""
    CONTINUED = auto()
    """The end of a turn that a single other turn has continued."""
    SHARED = auto()
    """A position that several sequences have in common."""
    CHUNK = auto()
    """A part of a long prompt, for prompts that diverge before the next such part."""


@dataclass(slots=True, eq=False)
class Turn:
    """A snapshot of the end of a turn of a conversation."""

    kind: SnapshotKind
    other_keys: list[BlockKey] = field(default_factory=list)
    """The keys of the snapshot of its other end, useless once a turn continues from this end."""


class Save(NamedTuple):
    """A snapshot that the plan being made is to copy if blocks are free."""

    sequence: Sequence
    position: int
    kind: SnapshotKind


class StateCopies(NamedTuple):
    """The copies and saves of states in a plan, as in `StepPlan`."""

    copies: list[BlockCopy]
    saves: list[StateSave]
    late_copies: list[BlockCopy]


class StateCopier:
    """Plans the copies of states on the device, and which positions have snapshots."""

    __slots__ = (
        "_device",
        "_evictions",
        "_first_live",
        "_held",
        "_least_saved",
        "_limits",
        "_num_free_spares",
        "_num_pending",
        "_planned",
        "_prefixes",
        "_turns",
        "_useless",
        "grid",
        "num_blocks",
        "num_loaded",
        "num_saved",
        "num_skipped",
        "num_swapped_out_blocks",
        "num_unreused_tokens",
        "saves",
    )

    def __init__(
        self,
        device: DeviceTier,
        prefixes: PrefixCache,
        *,
        num_blocks: int,
        num_tokens: int,
        grid: int,
        limits: StepLimits,
    ) -> None:
        """A state has `num_blocks`, which would have room for keys and values of `num_tokens`.

        `grid` is a multiple of the block size.
        """
        self._device = device
        self._prefixes = prefixes
        self.grid = grid
        """Positions of snapshots are multiples of it."""
        self._first_live = device.pool.num_blocks
        self.num_blocks = num_blocks
        """Blocks of a state."""
        self._least_saved = num_tokens // _LEAST_PART
        """The distance from which on a snapshot is worth its blocks."""
        self._limits = limits
        self._num_free_spares = limits.num_spare_states
        """Spare states that the plan that is being made does not use yet."""
        self._planned = StateCopies([], [], [])
        """Copies and saves in that plan."""
        self._evictions: list[BlockCopy] = []
        """Copies of the live states of preempted sequences to the CPU pool in that plan."""
        self._num_pending: dict[bytes, int] = {}
        """Running sequences that will make a snapshot, by its digest."""
        self.saves: list[Save] = []
        """Snapshots to make in that plan, once it has all its sequences."""
        self._turns = OrderedDict[bytes, Turn]()
        """Recent ends of turns by the digests of their first parts; other snapshots are shared."""
        self._held: list[int] = []
        """Blocks that these copies read or write, which are released with the plan."""
        self._useless: list[BlockKey] = []
        """The keys of snapshots that are of no use after the plan."""
        self.num_saved = self.num_loaded = 0
        """Snapshots that were made, and that were found and reused."""
        self.num_skipped = 0
        """Snapshots that were not made, since too few blocks were free."""
        self.num_swapped_out_blocks = 0
        """Blocks of the live states of preempted sequences that were copied to the CPU pool."""
        self.num_unreused_tokens = 0
        """Cached tokens behind the last snapshot that was found, which were computed again."""

    def clear(self) -> None:
        """Forget the plan that is being made."""
        self._held, self._useless = [], []
        self.end_plan()
        self._evictions, self._num_pending = [], {}

    @property
    def is_pending(self) -> bool:
        """Whether a running sequence is about to make a snapshot."""
        return bool(self._num_pending)

    def is_awaited(self, sequence: Sequence, num_found: int) -> bool:
        """Return whether a sequence should wait for a snapshot of another sequence.

        Both have a longer prefix in common than the `num_found` tokens that were found.
        """
        waiting = sequence.state
        assert isinstance(waiting, Waiting)
        position = self._num_known(sequence) // self.grid * self.grid
        if position <= num_found or waiting.num_state_waits == _MOST_WAITS:
            return False
        if next(self._prefixes.state_keys(sequence, position)).digest not in self._num_pending:
            return False
        waiting.num_state_waits += 1
        return True

    def admit(self, sequence: Sequence, load_ids: list[int]) -> None:
        """Begin a sequence with a cached prefix, and the blocks of the state after it."""
        if load_ids:
            self.num_loaded += 1
        num_unreused = self._num_known(sequence) - sequence.num_computed
        self.num_unreused_tokens += num_unreused
        states = self.resume(sequence, load_ids)
        states.last_position = sequence.num_computed
        # Siblings, and sequences that start again, find snapshots of their own request.
        if load_ids and sequence.active.is_queued:
            self._note_turn(sequence, continues_output=num_unreused >= self.grid)

    def resume(self, sequence: Sequence, load_ids: list[int]) -> SequenceStates:
        """Do the same for a sequence that comes back from the CPU pool, and return its states."""
        states = sequence.blocks.states = SequenceStates(load_ids)
        if self._device.is_enabled:
            states.wanted = self._wanted(sequence)
            for position in states.wanted:
                digest = next(self._prefixes.state_keys(sequence, position)).digest
                states.pending[position] = digest
                self._num_pending[digest] = self._num_pending.get(digest, 0) + 1
        return states

    def release(self, sequence: Sequence) -> None:
        """Release the blocks of a state that was not copied to its row yet."""
        states = sequence.blocks.states
        if states is None:
            return
        for block in states.load_ids:
            self._device.pool.release(block)
        for position in [*states.pending]:
            self._end_pending(states, position)

    def _end_pending(self, states: SequenceStates, position: int) -> None:
        """Let no sequence wait for a snapshot any more."""
        digest = states.pending.pop(position, None)
        if digest is not None:
            self._num_pending[digest] -= 1
            if not self._num_pending[digest]:
                del self._num_pending[digest]

    def loads_of(self, sequence: Sequence) -> list[int]:
        """Return the blocks of a state that was not copied to its row yet, if any."""
        states = sequence.blocks.states
        return [] if states is None else states.load_ids

    def evict_live(self, sequence: Sequence, targets: list[int]) -> None:
        """Copy the live state of a sequence that loses its row to blocks of the CPU pool."""
        self._evictions += self._copies_between(self._state_blocks(sequence.state.row), targets)
        self.num_swapped_out_blocks += len(targets)

    def take_evictions(self) -> list[BlockCopy]:
        """Return the copies of live states for the plan that is being made."""
        evictions, self._evictions = self._evictions, []
        return evictions

    def begin_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Prepare the next tokens of a prompt; return how many to compute, at most `num_tokens`.

        A chunk ends on the grid, so that the bits of states do not depend on the budget. It goes on
        at the position of a snapshot if kernels can save the state there.
        """
        self._load(sequence)
        states, first = sequence.blocks.states, sequence.num_computed
        assert states is not None
        end, num_free_spares = first + num_tokens, self._num_free_spares
        on_grid = end // self.grid * self.grid
        if end < sequence.prefill_end and on_grid > first:
            end = on_grid
        for position in reversed(states.wanted):
            if position >= end:
                break
            if not num_free_spares or (position - first) % self.grid:
                return position - first
            num_free_spares -= 1
        return end - first

    def end_chunk(self, sequence: Sequence) -> None:
        """Plan the snapshots up to the last token that a sequence will have computed."""
        states, end = sequence.blocks.states, sequence.num_computed
        assert states is not None
        last = states.last_position
        while states.wanted and states.wanted[-1] <= end:
            position, kind = states.wanted.pop(), SnapshotKind.SHARED
            if not states.wanted:
                kind = SnapshotKind.PROMPT
            elif position == last + _GRIDS_PER_PROMPT * self.grid:
                kind = SnapshotKind.CHUNK
            self.saves.append(Save(sequence, position, kind))
            self._num_free_spares -= position < end
            last = position

    def begin_decode(self, sequence: Sequence) -> None:
        """Prepare the next token of a running sequence, and when it is examined again."""
        position, states = sequence.num_computed, sequence.blocks.states
        assert states is not None
        is_due = self._device.is_enabled and states.keeps_ends
        is_due &= position % (_GRIDS_PER_DECODE * self.grid) == 0
        if not states.repeats_output:
            is_due &= position >= states.last_position + self._least_saved
        if not self._load(sequence) and is_due:
            self.saves.append(Save(sequence, position, SnapshotKind.DECODE))
        next_position = self.next_snapshot(position)
        sequence.unchecked_until = min(sequence.unchecked_until, next_position)

    def next_snapshot(self, position: int) -> int:
        """Return where a sequence that decodes its token at a position may have a snapshot next.

        No chain goes on behind it.
        """
        interval = _GRIDS_PER_DECODE * self.grid
        return (position // interval + 1) * interval

    def make_snapshot(self, save: Save) -> None:
        """Copy a state of a sequence to a snapshot, unless it exists or finds no room.

        Nothing else in the plan may need blocks afterwards.
        """
        sequence, device, states = save.sequence, self._device, save.sequence.blocks.states
        # At most one plan is in flight, which samples the next token.
        assert states is not None
        assert save.position <= len(sequence.token_ids)
        self._end_pending(states, save.position)
        if save.kind is SnapshotKind.DECODE:
            self._forget_replaced(states)
        keys = list(self._prefixes.state_keys(sequence, save.position))
        parts = [part for part, key in enumerate(keys) if device.find_block(key) is None]
        if len(parts) > device.pool.num_free:
            self.num_skipped += 1
            return
        if save.kind is not SnapshotKind.DECODE:
            states.last_position = save.position
        if not parts:
            return
        if save.kind is SnapshotKind.CHUNK:
            self._useless += states.chunk_keys
            states.chunk_keys = keys
        elif save.kind is not SnapshotKind.SHARED:
            self._note_end(states, keys, save.kind)
        is_prompt = save.kind is SnapshotKind.PROMPT
        is_replaced = save.kind is SnapshotKind.DECODE or (is_prompt and states.repeats_output)
        blocks = device.pool.allocate_all(len(parts))
        for part, block in zip(parts, blocks, strict=True):
            device.add_block(keys[part], block)
            sequence.blocks.unverified.append((block, keys[part]))
            if is_replaced:
                states.replaced.append((block, keys[part]))
        index, planned = sequence.state.row, self._planned
        if save.kind is not SnapshotKind.DECODE and save.position < sequence.num_computed:
            index = self._limits.max_num_seqs + len(planned.saves)
            planned.saves.append(StateSave(sequence.state.row, save.position))
        sources = self._state_blocks(index)
        copies = planned.copies if save.kind is SnapshotKind.DECODE else planned.late_copies
        copies += self._copies_between([sources[part] for part in parts], blocks)
        self._held += blocks
        self.num_saved += 1
        # The next token verifies it.
        sequence.recheck_at = 0

    def end_plan(self) -> StateCopies:
        """Return the copies and saves of states in the plan."""
        # The first part is evicted first, and looked up first.
        for block in self._held:
            self._device.pool.release(block)
        # The plan itself may have loaded what is evicted first from then on.
        self._evict_first(self._useless)
        planned, self._planned = self._planned, StateCopies([], [], [])
        self.saves, self._held, self._useless = [], [], []
        self._num_free_spares = self._limits.num_spare_states
        return planned

    def _load(self, sequence: Sequence) -> bool:
        """Copy a snapshot to the live state of a sequence if it begins with one.

        Returns whether it does.
        """
        states = sequence.blocks.states
        assert states is not None
        if not states.load_ids:
            return False
        live = self._state_blocks(sequence.state.row)
        self._planned.copies.extend(self._copies_between(states.load_ids, live))
        for block in states.load_ids:
            key = self._device.unverified_key(block)
            if key is not None:
                sequence.blocks.unverified.append((block, key))
        self._held += states.load_ids
        states.load_ids = []
        return True

    def _note_turn(self, sequence: Sequence, *, continues_output: bool) -> None:
        """Find out whether a sequence continues a turn, and which end its next turn will need.

        `continues_output` is whether more than its snapshot was cached.
        """
        states = sequence.blocks.states
        assert states is not None
        keys = list(self._prefixes.state_keys(sequence, sequence.num_computed))
        turn = self._turns.pop(keys[0].digest, None)
        if turn is None or turn.kind is SnapshotKind.CONTINUED:
            return
        self._remember(keys, SnapshotKind.CONTINUED)
        self._evict_first(turn.other_keys)
        states.origin = keys
        states.repeats_output = continues_output or turn.kind is SnapshotKind.DECODE
        states.keeps_ends = states.repeats_output

    def _forget_replaced(self, states: SequenceStates) -> None:
        """Free the last snapshot of a decoding sequence, which the next replaces."""
        for block, key in states.replaced:
            if self._device.find_block(key) == block:
                self._device.forget_block(block)
        states.replaced = []

    def _demote_origin(self, states: SequenceStates) -> None:
        """Evict the snapshot of an earlier turn first, unless other sequences reused it."""
        keys, states.origin = states.origin, []
        turn = self._turns.pop(keys[0].digest, None) if keys else None
        if turn is not None and turn.kind is SnapshotKind.CONTINUED:
            self._useless += keys

    def _evict_first(self, keys: list[BlockKey]) -> None:
        # The first part is looked up first, so it is evicted before the others.
        for block in map(self._device.find_block, reversed(keys)):
            if block is not None:
                self._device.pool.age(block)

    def _note_end(self, states: SequenceStates, keys: list[BlockKey], kind: SnapshotKind) -> None:
        """Note a snapshot of the end of a turn."""
        self._demote_origin(states)
        turn = self._remember(keys, kind)
        if kind is SnapshotKind.PROMPT:
            states.prompt_keys = keys
        elif states.prompt_keys:
            turn.other_keys = states.prompt_keys
            prompt = self._turns.get(states.prompt_keys[0].digest)
            if prompt is not None:
                prompt.other_keys = keys

    def _remember(self, keys: list[BlockKey], kind: SnapshotKind) -> Turn:
        turn = self._turns[keys[0].digest] = Turn(kind)
        if len(self._turns) > _MOST_TURNS:
            self._turns.popitem(last=False)
        return turn

    def _num_known(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence had cached blocks, with or without their state."""
        return max(sequence.blocks.num_known * self._prefixes.block_size, sequence.num_computed)

    def _wanted(self, sequence: Sequence) -> list[int]:
        """Return the positions at which the rest of a prompt gets snapshots, the last first."""
        grid, first = self.grid, sequence.num_computed
        request, num_tokens = sequence.active.request, sequence.num_prompt_tokens
        anchors = [min(length, num_tokens) for length in request.anchors or (num_tokens - 1,)]
        ends = {max(anchors)} | ({num_tokens - 1} if request.sampling.n > 1 else set())
        found, last = list[int](), first // grid * grid
        for length in sorted({*anchors, *ends, self._num_known(sequence)}):
            position = length // grid * grid
            if position > last and (length in ends or position >= last + self._least_saved):
                found += self._between(last, position)
                found.append(position)
                last = position
        found += self._between(last, sequence.prefill_end)
        return found[::-1]

    def _between(self, first: int, end: int) -> range:
        """Return the positions of snapshots between two distant snapshots."""
        interval = _GRIDS_PER_PROMPT * self.grid
        return range(first + interval, end, interval)

    def _state_blocks(self, index: int) -> list[int]:
        """Return the blocks of the live state of a row, or of a spare state behind all rows."""
        first = self._first_live + index * self.num_blocks
        return list(range(first, first + self.num_blocks))

    def _copies_between(self, sources: list[int], targets: list[int]) -> list[BlockCopy]:
        return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]
