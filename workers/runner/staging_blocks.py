"""Device blocks that hold evicted content until it is on the host.

A step may overwrite an evicted block at once if its content was staged before: a copy within the
device takes a hundredth of the time of a copy to the host.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.device_event import DeviceEvent

__all__ = ["StagingBlocks"]


class StagingBlocks:
    """Gives out blocks, and takes them back once the copies from them have ended."""

    def __init__(self, *, first_block: int, num_blocks: int) -> None:
        self._free = list(range(first_block, first_block + num_blocks))
        self._in_use: deque[tuple[DeviceEvent, list[int]]] = deque()

    def take(self, num_blocks: int) -> list[int]:
        """Return free blocks, at most `num_blocks`; `give_back` must follow."""
        while self._in_use and self._in_use[0][0].query():
            self._free += self._in_use.popleft()[1]
        num_left = max(len(self._free) - num_blocks, 0)
        taken = self._free[num_left:]
        del self._free[num_left:]
        return taken

    def give_back(self, blocks: list[int], copied: DeviceEvent) -> None:
        """Take blocks back that were read once `copied` has completed."""
        if blocks:
            self._in_use.append((copied, blocks))
