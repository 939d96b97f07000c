"""Returns freed memory to the system, which the allocator keeps for later."""

from __future__ import annotations

import asyncio
import ctypes

__all__ = ["MemoryTrimmer", "trim_memory"]

_DELAY_S = 1.0
_MOST_DELAYS = 5
_LARGE_BYTES = 2**16
_MUCH_BYTES = 2**24


class MemoryTrimmer:
    """Trims memory after many large requests and responses. Used from the event loop only.

    It takes tens of milliseconds on a thread, during which others may wait for memory, so it comes
    a second after the last of them, or every five seconds while they continue. The next requests
    use the memory of small requests.
    """

    def __init__(self, *, delay_s: float = _DELAY_S) -> None:
        self._delay_s = delay_s
        self._num_freed_bytes = 0
        """Bytes of large requests and responses since the last trim."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_quiet = True
        """Whether none of them was freed since the timer was started."""
        self._num_delays = 0

    def note_freed(self, num_bytes: int) -> None:
        """Note that a request or a response of this many bytes is freed."""
        if num_bytes < _LARGE_BYTES:
            return
        self._is_quiet = False
        self._num_freed_bytes += num_bytes
        if self._timer is None and self._num_freed_bytes >= _MUCH_BYTES:
            self._num_delays = 0
            self._start_timer()

    def _start_timer(self) -> None:
        self._is_quiet = True
        self._num_delays += 1
        self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._trim_if_quiet)

    def _trim_if_quiet(self) -> None:
        if not self._is_quiet and self._num_delays < _MOST_DELAYS:
            self._start_timer()
            return
        self._timer = None
        self._num_freed_bytes = 0
        # ctypes releases the GIL.
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


def trim_memory() -> None:
    """Return unused memory of the allocator to the system, if it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
