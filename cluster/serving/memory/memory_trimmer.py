"""Returns freed memory to the system, which the allocator keeps for later."""

from __future__ import annotations

import asyncio
import ctypes

__all__ = ["MemoryTrimmer", "trim_memory"]

_DELAY_S = 5.0
_LARGE_BYTES = 2**16
_MUCH_BYTES = 2**24


class MemoryTrimmer:
    """Trims memory some seconds after many large requests. Used from the event loop only.

    What small requests take is used by the next ones.
    """

    def __init__(self, *, delay_s: float = _DELAY_S) -> None:
        self._delay_s = delay_s
        self._num_freed_bytes = 0
        """What large requests took since the last time."""
        self._timer: asyncio.TimerHandle | None = None

    def note_freed(self, num_bytes: int) -> None:
        """Note that a request of so many bytes is freed."""
        if num_bytes < _LARGE_BYTES:
            return
        self._num_freed_bytes += num_bytes
        if self._timer is None and self._num_freed_bytes >= _MUCH_BYTES:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._trim)

    def _trim(self) -> None:
        self._timer = None
        self._num_freed_bytes = 0
        # It takes milliseconds, without the interpreter's lock.
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


def trim_memory() -> None:
    """Return what the allocator keeps to the system, if it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
