"""Watches the progress of an engine, by the clock of the engine."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EngineClock", "ProgressClock", "Watchdog", "position_of"]

_INTERVAL_S = 0.25
_MAX_TICK_S = 0.5
_STOP_TIMEOUT_S = 1.0
_NUM_FRAMES = 3


class Watchdog:
    """Calls a check regularly until it is stopped."""

    def __init__(self, check: Callable[[float], None]) -> None:
        """`check` takes the time on the monotonic clock and must not raise."""
        self._check = check
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagedray-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread. Called once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits briefly for a check that runs."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self._check(time.monotonic())


class ProgressClock:
    """Measures for how long nothing has changed, by the time that was observed.

    If the observer did not run, because the machine or its process was paused, that time does not
    count.
    """

    def __init__(self, *, max_tick_s: float = _MAX_TICK_S) -> None:
        """An observation adds at most `max_tick_s`, more than usually passes between two."""
        self._max_tick_s = max_tick_s
        self._seen: object = None
        self._observed_s: float | None = None
        self._silent_s = 0.0

    def silence_s(self, now_s: float, seen: object, *, is_expected: bool) -> float:
        """Return the observed time since `seen` changed or was expected not to."""
        elapsed_s = 0.0
        if self._observed_s is not None:
            elapsed_s = min(max(now_s - self._observed_s, 0.0), self._max_tick_s)
        self._observed_s = now_s
        self._silent_s = 0.0 if is_expected or seen != self._seen else self._silent_s + elapsed_s
        self._seen = seen
        return self._silent_s


def position_of(thread: threading.Thread) -> str:
    """Return the innermost calls of a thread, for the log."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "the thread has ended"
    calls = traceback.extract_stack(frame)[-_NUM_FRAMES:]
    return ", ".join(f"{call.filename}:{call.lineno} in {call.name}" for call in reversed(calls))


class EngineClock:
    """The monotonic clock. Simulations replace it, so that time passes only where they say."""

    def now_s(self) -> float:
        """Return the time on the monotonic clock."""
        return time.monotonic()

    def make_condition(self) -> threading.Condition:
        """Return a condition for threads to wait on."""
        return threading.Condition()
