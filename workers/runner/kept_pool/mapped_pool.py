"""Maps the memory in which a CPU pool outlives its rank.

Only one process maps the pool at a time: a replaced rank can no longer write to it. A digest after
the blocks names their origin; it is written once the scheduler knows that the blocks are new. A
rank that computes other keys and values than its predecessor starts with zeros.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from typing import TYPE_CHECKING

from pagedray.node_memory import open_memory

if TYPE_CHECKING:
    from pagedray.node_memory import MemoryAddress

__all__ = ["MappedPool"]

_LOCK_TIMEOUT_S = 5.0
"""How long a process that was killed may take to end."""
_LOCK_POLL_S = 0.02


class MappedPool:
    """The memory of one CPU pool in this process."""

    def __init__(
        self,
        address: MemoryAddress,
        *,
        num_bytes: int,
        num_extra_bytes: int,
        origin: bytes,
        timeout_s: float = _LOCK_TIMEOUT_S,
    ) -> None:
        """Map `num_bytes` of blocks that depend on `origin`, 32 bytes.

        `num_extra_bytes` are kept with the blocks. Raises OSError if the memory is not available,
        or another process does not release it.
        """
        assert len(origin) == 32
        self._origin = origin
        self._start = start = _round_up(num_bytes)
        size = start + _round_up(len(origin) + num_extra_bytes)
        descriptor = open_memory(address)
        try:
            _lock(descriptor, timeout_s)
            has_size = os.fstat(descriptor).st_size == size
            self.is_former = has_size and os.pread(descriptor, len(origin), start) == origin
            """Whether another process wrote and confirmed the content."""
            if not self.is_former:
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, size)
            self.memory = mmap.mmap(descriptor, size)
            """Its copy of the descriptor has the lock, which ends with it."""
        finally:
            os.close(descriptor)
        first = start + len(origin)
        self.extra = memoryview(self.memory)[first : first + num_extra_bytes]

    def confirm(self) -> None:
        """Let the next process find the content, instead of mistaking it for an older pool."""
        self.memory[self._start : self._start + len(self._origin)] = self._origin


def _lock(descriptor: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError("another process still uses the memory") from None
        time.sleep(_LOCK_POLL_S)


def _round_up(num_bytes: int) -> int:
    """Return the bytes of whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
