"""The time of an engine, and what its threads wait for each other on."""

from __future__ import annotations

import threading
import time

__all__ = ["EngineClock"]


class EngineClock:
    """The monotonic clock. Simulations replace it, so that time passes only where they say."""

    def now_s(self) -> float:
        """Return the time on the monotonic clock."""
        return time.monotonic()

    def make_condition(self) -> threading.Condition:
        """Return what a thread waits on until another one notifies it."""
        return threading.Condition()
