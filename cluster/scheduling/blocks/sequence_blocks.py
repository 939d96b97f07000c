"""The blocks of a sequence, and what the prefix cache has of them.

Only a record: the KV manager allocates and releases the blocks.
"""

from array import array
from typing import NamedTuple

from cluster.scheduling.blocks.prefix_cache import BlockKey

__all__ = ["SequenceBlocks", "Shortage"]


class Shortage(NamedTuple):
    """The state of the prefix cache when a sequence that shares blocks found too few free ones."""

    next_key: BlockKey | None
    """Key of the first block that was not cached; None if all that it can share were."""
    num_shared: int
    """Cached blocks that need no free block, since they were not idle."""
    num_changes: int
    """Events so far that may let it share one more of them."""
    revision: int
    """The revision of the prefix cache."""


class SequenceBlocks:
    """The blocks of a sequence in both pools; the KV manager and its `prefixes` change them."""

    __slots__ = (
        "awaits_copies",
        "cpu_ids",
        "disk_step",
        "ids",
        "keys",
        "keys_revision",
        "num_left_behind",
        "num_proven",
        "num_registered",
        "num_slots",
        "reserved_ids",
        "shortage",
    )

    def __init__(self) -> None:
        self.keys = list[BlockKey]()
        """Keys of the leading full blocks, as far as hashed."""
        self.keys_revision = 0
        """The revision of the prefix cache when the first key was hashed."""
        self.num_registered = 0
        """Leading blocks that were registered with the prefix cache."""
        self.num_proven = 0
        """Leading blocks that gave finite logits."""
        self.clear()

    def clear(self) -> None:
        """Forget all blocks; the keys of their tokens stay."""
        self.ids = array("i")
        """The block table, as in the worker."""
        self.num_slots = 0
        """Capacity of the block table in tokens."""
        self.reserved_ids: list[int] = []
        """Blocks allocated in advance; the last is used first."""
        self.cpu_ids: list[int] = []
        self.awaits_copies = False
        """Whether some of its blocks are copied to the device when it starts."""
        self.disk_step: int | None = None
        """The step whose reads from the disk it waits for, or -1; None if it needs a look-up."""
        self.num_left_behind = 0
        """Blocks before these that were not swapped out, since others shared them."""
        self.shortage: Shortage | None = None
        """The shortage at its last attempt to start, if it has waited since then."""
