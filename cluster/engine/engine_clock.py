"""The time of an engine, and the conditions that its threads wait on."""

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
        """Return a condition for threads to wait on."""
        return threading.Condition()
