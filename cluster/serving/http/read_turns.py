"""Few connections are read in each pass of the event loop, so that tokens wait for few.

asyncio serves every socket that is ready before anything else: hundreds of requests at once would
take tens of milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReadTurns"]

_PER_PASS = 4
"""Reads of a pass, each of which may begin a request of some 0.3 ms."""
_MAX_WAITING_BYTES = 2**22
"""Of all connections that wait; beyond it none waits."""


class ReadTurns:
    """Decides when what was received on a connection is handled. Used from the loop only."""

    def __init__(self, *, has_streams: Callable[[], bool]) -> None:
        """`has_streams` returns whether anyone waits for tokens; otherwise nothing waits."""
        self._has_streams = has_streams
        self._num_left = _PER_PASS
        self._is_counting = False
        """Whether the next pass is scheduled to begin the count again."""
        self._waiting: dict[str, deque[tuple[Callable[[], None], int]]] = {}
        """What handles the reads of each host, whose turn comes in order, and their bytes."""
        self._num_waiting_bytes = 0

    def take(self) -> bool:
        """Return whether a read may be handled in this pass."""
        if not self._has_streams() or self._num_waiting_bytes > _MAX_WAITING_BYTES:
            return True
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_pass)
        if not self._num_left:
            return False
        self._num_left -= 1
        return True

    def wait(self, host: str, handle: Callable[[], None], num_bytes: int) -> None:
        """Have `handle` called in a later pass, after `take` has returned False."""
        self._waiting.setdefault(host, deque()).append((handle, num_bytes))
        self._num_waiting_bytes += num_bytes

    def _begin_pass(self) -> None:
        self._num_left = _PER_PASS
        while self._waiting and self._num_left:
            self._num_left -= 1
            host = next(iter(self._waiting))
            reads = self._waiting.pop(host)
            handle, num_bytes = reads.popleft()
            if reads:
                # Behind the other hosts.
                self._waiting[host] = reads
            self._num_waiting_bytes -= num_bytes
            handle()
        self._is_counting = bool(self._waiting) or self._num_left < _PER_PASS
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin_pass)
