"""The device blocks of a sequence, with its snapshots of recurrent states."""

from __future__ import annotations

from array import array

from cluster.scheduling.device_tier import BlockKey

__all__ = ["SequenceBlocks", "SequenceStates"]


class SequenceStates:
    """The snapshots of a sequence that has device blocks."""

    __slots__ = (
        "chunk_keys",
        "keeps_ends",
        "last_position",
        "load_ids",
        "origin",
        "pending",
        "prompt_keys",
        "repeats_output",
        "replaced",
        "wanted",
    )

    def __init__(self, load_ids: list[int]) -> None:
        self.load_ids = load_ids
        """Blocks that the sequence owns with its state, until they are copied to its row."""
        self.wanted: list[int] = []
        """Positions at which the prompt gets a snapshot, in descending order."""
        self.pending: dict[int, bytes] = {}
        """The digests of these snapshots, as long as they are not made."""
        self.last_position = 0
        """The position of the last snapshot of its prompt."""
        self.keeps_ends = True
        """Whether the sequence makes snapshots while decoding."""
        self.repeats_output = False
        """Whether its prompt continues the output of another sequence, as the next turn may."""
        self.replaced: list[tuple[int, BlockKey]] = []
        """The blocks that the next snapshot of a decode replaces, with their keys."""
        self.chunk_keys: list[BlockKey] = []
        """The keys of its last snapshot at a long distance from the snapshot before."""
        self.prompt_keys: list[BlockKey] = []
        """The keys of the snapshot of the end of its prompt."""
        self.origin: list[BlockKey] = []
        """The keys of the snapshot of an earlier turn, from which the sequence started."""


class SequenceBlocks:
    """The device blocks of a sequence, and the keys of its tokens."""

    __slots__ = (
        "ids",
        "keys",
        "keys_revision",
        "num_dead",
        "num_known",
        "num_registered",
        "num_slots",
        "num_verified",
        "num_wanted",
        "reserved_ids",
        "states",
        "unverified",
    )

    def __init__(self) -> None:
        self.keys = list[BlockKey]()
        """Keys of the leading full blocks, as far as hashed."""
        self.keys_revision = 0
        """The revision of the prefix cache when the first key was hashed."""
        self.num_registered = 0
        """Leading entries with blocks that were registered with the prefix cache."""
        self.num_verified = 0
        """Leading entries with blocks that gave finite logits."""
        self.num_known = 0
        """Leading entries that other sequences had computed when this sequence was looked up."""
        self.clear()

    def clear(self) -> None:
        """Forget all blocks; the keys of their tokens stay."""
        self.ids = array("i")
        """The block table, entry by entry: a block in each group of layers."""
        self.num_dead = list[int]()
        """Leading entries of each group that have no block, since no later query sees them."""
        self.num_wanted = 0
        """Entries for which the sequence got blocks when it started."""
        self.unverified = list[tuple[int, BlockKey]]()
        """Blocks released before their values gave finite logits."""
        self.states: SequenceStates | None = None
        """Snapshots of the recurrent state, if any layer has a state."""
        self.num_slots = 0
        """Capacity of the block table in tokens."""
        self.reserved_ids: list[int] = []
        """Blocks allocated in advance; the last is used first."""

    def extend(self, num_tokens: int, block_size: int, num_groups: int = 1) -> list[int]:
        """Extend the block table to `num_tokens` with reserved blocks, and return them."""
        num_added = -(-(num_tokens - self.num_slots) // block_size) * num_groups
        if num_added <= 0:
            return []
        added = self.reserved_ids[: -num_added - 1 : -1]
        del self.reserved_ids[-num_added:]
        self.ids.extend(added)
        self.num_slots += num_added // num_groups * block_size
        return added
