"""Pauses of threads that hold the GIL for a long time."""

from __future__ import annotations

import time

__all__ = ["ThreadPauses"]

_WORK_S = 0.0005
"""CPU time between two pauses."""
_PAUSE_S = 0.0015
"""Enough for most of the work of other threads for a token."""
_LONG_PAUSE_S = 0.01
"""Several tokens: on a busy machine, the work of a thread between pauses delays one of them."""


class ThreadPauses:
    """Pauses of the thread that created it, in which other threads get the GIL.

    Without pauses, the event loop and the engine would wait five milliseconds whenever they need
    the GIL, which is several times a token.
    """

    def __init__(self, *, are_long: bool) -> None:
        """The thread works 5% of the time with long pauses, and 25% with others."""
        self.pause_s = _LONG_PAUSE_S if are_long else _PAUSE_S
        self._next_s = time.thread_time() + _WORK_S

    def pause_if_due(self, now_s: float) -> None:
        """Pause if the last pause was long ago; `now_s` is the CPU time of the thread."""
        if now_s > self._next_s:
            self._next_s = now_s + _WORK_S
            time.sleep(self.pause_s)
