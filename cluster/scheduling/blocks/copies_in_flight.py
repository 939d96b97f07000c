"""The blocks that copies between the pools use, until every rank has made them."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["CopiedBlocks", "CopiesInFlight"]


class CopiedBlocks(NamedTuple):
    """The blocks of both pools that the plan of a step copies, whose direction does not matter."""

    step: int
    block_ids: list[int]
    cpu_block_ids: list[int]


class CopiesInFlight:
    """Copied blocks in the order of their steps."""

    __slots__ = ("_copied",)

    def __init__(self) -> None:
        self._copied: deque[CopiedBlocks] = deque()

    def add_blocks(self, step: int, block_ids: list[int], cpu_block_ids: list[int]) -> None:
        """Add the pinned blocks of copies in the plan of `step`."""
        self._copied.append(CopiedBlocks(step, block_ids, cpu_block_ids))

    def take_ended(self, step: int) -> Iterator[CopiedBlocks]:
        """Yield and forget the blocks of copies up to `step`."""
        while self._copied and self._copied[0].step <= step:
            yield self._copied.popleft()

    def clear(self) -> None:
        """Forget all copies, as after the ranks were replaced."""
        self._copied.clear()
