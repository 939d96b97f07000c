"""The blocks of one pool, on the device or on the CPU: free, owned or in transit.

A block is owned while a sequence has a reference to it, in transit while a copy still
reads or writes it but no sequence owns it, and free otherwise. A free block whose
content is kept is idle: idle blocks are allocated last, in order of release.

The content of blocks is the prefix cache's concern.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, KeysView, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BlockError", "BlockPool"]


class BlockError(PagedRayError):
    """An operation is invalid in the block's state."""


class BlockPool:
    """Allocates and frees blocks `0 .. num_blocks - 1`; operations on one block are O(1)."""

    __slots__ = (
        "_free",
        "_idle",
        "_is_kept",
        "_num_pins",
        "_num_references",
        "_on_evict",
        "num_blocks",
        "num_in_transit",
        "num_reused",
    )

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None] | None) -> None:
        """All blocks are free. `on_evict` gets each idle block that is allocated."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.clear()

    def clear(self, *, idle: Sequence[int] = ()) -> None:
        """Make all blocks free, and blocks of `idle` idle, the least recently used first."""
        self.num_in_transit = 0
        """Blocks that a copy still uses and no sequence owns."""
        self.num_reused = 0
        """Times that an idle block was shared."""
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(idle)
        self._free = [
            block for block in reversed(range(self.num_blocks)) if block not in self._idle
        ]
        self._num_references = array("i", [0]) * self.num_blocks
        self._num_pins = [0] * self.num_blocks
        self._is_kept = bytearray(self.num_blocks)
        for block in idle:
            self._is_kept[block] = True

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, including idle blocks."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Free blocks that keep their contents."""
        return len(self._idle)

    @property
    def idle_blocks(self) -> KeysView[int]:
        """The idle blocks, the least recently used first."""
        return self._idle.keys()

    def num_in_use(self, blocks: Sequence[int]) -> int:
        """Return how many of the `blocks`, which are owned, in transit or idle, are not idle."""
        return len(blocks) - sum(map(self._idle.__contains__, blocks))

    def is_shared(self, block: int) -> bool:
        """Return whether several sequences own a block."""
        return self._num_references[block] > 1

    def allocate(self) -> int:
        """Return a free block, owned once; if all are idle, the least recently used."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block = self._idle.popitem(last=False)[0]
            self._is_kept[block] = False
            if self._on_evict is not None:
                self._on_evict(block)
        else:
            raise BlockError(f"None of the {self.num_blocks} blocks is free.")
        self._num_references[block] = 1
        return block

    def allocate_all(self, num_blocks: int) -> list[int]:
        """Return several free blocks, each owned once."""
        return [self.allocate() for _ in range(num_blocks)]

    def share(self, block: int) -> None:
        """Add an owner to a block that is owned, in transit or idle."""
        if not self._num_references[self._checked(block)]:
            if self._num_pins[block]:
                self.num_in_transit -= 1
            elif block in self._idle:
                del self._idle[block]
                self.num_reused += 1
            else:
                raise BlockError(f"Block {block} is free and cannot be shared.")
        self._num_references[block] += 1

    def share_all(self, blocks: Sequence[int]) -> None:
        """Add an owner to each of several blocks that are owned, in transit or idle."""
        for block in blocks:
            self.share(block)

    def release(self, block: int) -> None:
        """Take one owner from a block."""
        if not self._num_references[self._checked(block)]:
            raise BlockError(f"Block {block} is released but has no owner.")
        self._num_references[block] -= 1
        if not self._num_references[block]:
            self._end_ownership(block)

    def share_owned(self, blocks: "array[int]") -> None:
        """Add an owner to each of several blocks that are owned."""
        # A long prompt has thousands of blocks, which a loop takes a millisecond to count.
        self._references()[np.frombuffer(blocks, np.int32)] += 1

    def release_all(self, blocks: "array[int]") -> None:
        """Take one owner from each of several blocks, the last block first."""
        if not blocks:
            return
        ids, references = np.frombuffer(blocks, np.int32), self._references()
        num_left = references[ids] - 1
        if num_left.min() < 0:
            raise BlockError(f"Block {ids[num_left.argmin()]} is released but has no owner.")
        references[ids] = num_left
        for block in ids[num_left == 0][::-1].tolist():
            self._end_ownership(block)

    def pin(self, block: int) -> None:
        """Keep an owned block from being freed until `unpin`, because a copy uses it."""
        if not self._num_references[self._checked(block)]:
            raise BlockError(f"Block {block} is pinned but has no owner.")
        self._num_pins[block] += 1

    def pin_cached(self, block: int) -> None:
        """Keep a block that is owned, in transit or idle from being freed until `unpin`."""
        self.share(block)
        self.pin(block)
        self.release(block)

    def unpin(self, block: int) -> None:
        """Undo `pin`, because the copy is done."""
        if not self._num_pins[self._checked(block)]:
            raise BlockError(f"Block {block} is unpinned but has no pin.")
        self._num_pins[block] -= 1
        if not self._num_pins[block] and not self._num_references[block]:
            self.num_in_transit -= 1
            self._set_free(block)

    def keep(self, block: int) -> None:
        """Make an owned block idle once it has no owner."""
        if not self._num_references[self._checked(block)]:
            raise BlockError(f"Block {block} is kept but has no owner.")
        self._is_kept[block] = True

    def discard(self, block: int) -> None:
        """Undo `keep`, because the block's content is invalid."""
        self._is_kept[self._checked(block)] = False
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def touch(self, block: int) -> None:
        """Make an idle block the most recently used."""
        if block in self._idle:
            self._idle.move_to_end(block)

    def age(self, block: int) -> None:
        """Make an idle block the least recently used."""
        if block in self._idle:
            self._idle.move_to_end(block, last=False)

    def _references(self) -> "NDArray[np.int32]":
        return np.frombuffer(self._num_references, np.int32)

    def _end_ownership(self, block: int) -> None:
        if self._num_pins[block]:
            self.num_in_transit += 1
        else:
            self._set_free(block)

    def _set_free(self, block: int) -> None:
        if self._is_kept[block]:
            self._idle[block] = None
        else:
            self._free.append(block)

    def _checked(self, block: int) -> int:
        # A negative index would silently select another block.
        if 0 <= block < self.num_blocks:
            return block
        raise BlockError(f"Block {block} is not in the pool of {self.num_blocks}.")
