"""Virtual time: events in order, an asyncio event loop among them, and one thread that waits."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from typing import TYPE_CHECKING, Any

from cluster.engine.watchdog import EngineClock

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

__all__ = ["StuckError", "World"]

_MOST_EVENTS = 100_000
_FIRST_S = 1.0


class StuckError(AssertionError):
    """Nothing is left that could happen, or far too much happens."""


class World(EngineClock):
    """Runs events while the engine's thread waits, so that a run has no other thread."""

    def __init__(self) -> None:
        self._now_s = _FIRST_S
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._num_events = 0
        self._conditions: list[_Condition] = []
        self.loop = _Loop(self)

    def now_s(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def make_condition(self) -> threading.Condition:
        """Return a condition on which the engine's thread may wait."""
        condition = _Condition(self)
        self._conditions.append(condition)
        return condition  # type: ignore[return-value]  # it has what the engine uses

    def call_at(self, time_s: float, call: Callable[[], None]) -> None:
        """Have `call` run at a time."""
        heapq.heappush(self._events, (max(time_s, self._now_s), next(self._numbers), call))

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have `call` run after a delay."""
        self.call_at(self._now_s + delay_s, call)

    def run_until(self, is_over: Callable[[], bool], end_s: float = math.inf) -> None:
        """Run events until something is over, or until a time. Raises StuckError."""
        assert not any(one.is_held for one in self._conditions), "waits while it holds the lock"
        while not is_over():
            self._num_events += 1
            if self._num_events > _MOST_EVENTS:
                raise StuckError("The run does not end.")
            if self.loop.is_ready:
                self.loop.run_ready()
                continue
            event_s = self._events[0][0] if self._events else math.inf
            next_s = min(event_s, self.loop.next_timer_s)
            if next_s == math.inf and end_s == math.inf:
                raise StuckError("The engine waits, and nothing can happen.")
            if next_s > end_s:
                self._now_s = end_s
                return
            self._now_s = max(next_s, self._now_s)
            if event_s <= self.loop.next_timer_s:
                heapq.heappop(self._events)[2]()
            else:
                self.loop.run_ready()


class _Condition:
    """A condition whose waiter lets events run. Only the engine's thread waits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_held = 0
        self._is_notified = False

    @property
    def is_held(self) -> bool:
        return self._num_held > 0

    def acquire(self, timeout: float = -1.0) -> bool:
        self._num_held += 1
        return True

    def release(self) -> None:
        assert self._num_held
        self._num_held -= 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def notify(self) -> None:
        assert self._num_held, "notifies without the lock"
        self._is_notified = True

    def wait(self, timeout: float | None = None) -> bool:
        return self.wait_for(lambda: self._is_notified, timeout)

    def wait_for(self, is_over: Callable[[], bool], timeout: float | None = None) -> bool:
        assert self._num_held == 1
        self._num_held, self._is_notified = 0, False
        end_s = math.inf if timeout is None else self._world.now_s() + timeout
        try:
            self._world.run_until(is_over, end_s)
        finally:
            self._num_held = 1
        return is_over()


class _NoFiles:
    """What an event loop asks for readable files: there are none, and it never waits."""

    def select(self, timeout: float | None = None) -> list[Any]:  # Any: asyncio's own
        return []


class _Loop(asyncio.BaseEventLoop):
    """An event loop that runs when the world says."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._selector = _NoFiles()

    def time(self) -> float:
        return self._world.now_s()

    @property
    def is_ready(self) -> bool:
        return bool(self._ready)  # type: ignore[attr-defined]

    @property
    def next_timer_s(self) -> float:
        """When the next timer is due; infinite without one."""
        timers = [one for one in self._scheduled if not one.cancelled()]  # type: ignore[attr-defined]
        return min((one.when() for one in timers), default=math.inf)

    def run_ready(self) -> None:
        """Run what is ready or due."""
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(None)

    def _process_events(self, event_list: list[Any]) -> None:  # Any: asyncio's own
        assert not event_list

    def _write_to_self(self) -> None:
        """Nothing has to wake the loop."""
