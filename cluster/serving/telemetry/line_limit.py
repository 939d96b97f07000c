"""Limits how often lines that any client can cause are logged."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LineLimit", "LineRate"]

_INTERVAL_S = 60.0
_MAX_LINES = 20
_PERIOD_S = 1.0


class LineLimit:
    """Allows a log line per minute, about all events since the last line."""

    def __init__(
        self, *, interval_s: float = _INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = clock()
        self._num_events = 0

    def count_event(self) -> int:
        """Count an event; return the number to log, or 0 if there is to be no line yet."""
        self._num_events += 1
        now_s = self._clock()
        if now_s < self._next_s:
            return 0
        self._next_s = now_s + self._interval_s
        num_events, self._num_events = self._num_events, 0
        return num_events


class LineRate:
    """Allows 20 log lines at once, and one more each second."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._num_allowed = float(_MAX_LINES)
        self._num_omitted = 0

    def count_event(self) -> int | None:
        """Count an event; return how many had no line before it, or None if it has none either."""
        now_s = self._clock()
        allowed = self._num_allowed + (now_s - self._last_s) / _PERIOD_S
        self._last_s = now_s
        self._num_allowed = min(float(_MAX_LINES), allowed)
        if self._num_allowed < 1:
            self._num_omitted += 1
            return None
        self._num_allowed -= 1
        num_omitted, self._num_omitted = self._num_omitted, 0
        return num_omitted
