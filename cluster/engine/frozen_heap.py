"""Keeps Python's garbage collector from traversing objects that long calls leave unchanged."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["CallFreezer", "freeze_heap"]

_FIRST_S = 60.0
_SHARE = 0.002
"""Share of the time for full collections when calls begin, and for counting frozen objects."""
_NUM_OF_PYTHON = 1000
"""More than Python 3.12 freezes when it starts (375), and fewer than a program with PagedRay."""


@contextmanager
def freeze_heap() -> Generator[None]:
    """Exempt the objects that exist from garbage collection, until the end of the context.

    Traversing the token ids of a few hundred prompts takes a quarter of a second, during which no
    step is scheduled. Objects that the caller has frozen remain so.
    """
    if _is_frozen():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class CallFreezer:
    """Freezes the heap while calls run, and collects garbage in between.

    Freezing resets the counts by which Python decides when to make a full collection. A program
    that does little but call would never make a full collection, and its garbage in cycles would
    stay.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._due_s = clock() + _FIRST_S
        """The first call after this time begins with a full collection."""
        self._next_count_s = clock()
        """When the objects that the caller has frozen are counted again."""
        self._calls: set[object] = set()
        self._frozen = ExitStack()
        # Reentrant, since a collection may close a generator in which a call runs.
        self._lock = threading.RLock()

    @contextmanager
    def freeze(self) -> Generator[None]:
        """Run `freeze_heap` until no call runs, after a full collection if due."""
        call = object()
        with self._lock:
            if not self._calls and not self._has_caller_frozen():
                self._collect_if_due()
                self._frozen.enter_context(freeze_heap())
            self._calls.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)
                if not self._calls:
                    self._frozen.close()

    def _has_caller_frozen(self) -> bool:
        began_s = self._clock()
        if began_s < self._next_count_s:
            return True
        # Python traverses the frozen objects to count them: 50 ms for a million.
        if not _is_frozen():
            return False
        ended_s = self._clock()
        self._next_count_s = ended_s + (ended_s - began_s) / _SHARE
        return True

    def _collect_if_due(self) -> None:
        # Leave the caller's garbage alone if the caller has disabled collection.
        if not gc.isenabled() or self._clock() < self._due_s:
            return
        began_s = self._clock()
        gc.collect()
        ended_s = self._clock()
        self._due_s = ended_s + (ended_s - began_s) / _SHARE


def _is_frozen() -> bool:
    """Return whether the program has frozen its objects."""
    return gc.get_freeze_count() > _NUM_OF_PYTHON
