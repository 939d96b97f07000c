"""Pauses of threads that hold the interpreter's lock for long."""

from __future__ import annotations

import threading
import time

__all__ = ["ThreadPauses"]

_WORK_S = 0.0005
"""CPU time between two pauses."""
_PAUSE_S = 0.0015
"""Enough for most of what other threads do for a token."""


class ThreadPauses:
    """Lets others run while the thread that made it works, unless that is the main one.

    Without pauses, the event loop and the engine would wait five milliseconds whenever they need
    the interpreter's lock, which is several times a token.
    """

    def __init__(self) -> None:
        self._gives_way = threading.current_thread() is not threading.main_thread()
        self._next_s = time.thread_time() + _WORK_S

    def pause_if_due(self, now_s: float) -> None:
        """Pause if the thread has worked for long; `now_s` is its CPU time."""
        if self._gives_way and now_s > self._next_s:
            self._next_s = now_s + _WORK_S
            time.sleep(_PAUSE_S)
