"""Keeps Python's garbage collector from traversing what long calls and servers do not change."""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["CallFreezer", "freeze_heap"]

_FIRST_S = 60.0
_SHARE = 0.002
"""Of the time, for full collections at the beginning of calls."""


@contextmanager
def freeze_heap() -> Generator[None]:
    """Exempt the objects that exist from garbage collection, until the end of the context.

    To traverse the token ids of some hundred prompts takes a quarter of a second, during which no
    step is scheduled. Objects that the caller has frozen remain so.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class CallFreezer:
    """Freezes the heap for one call after another, and collects garbage in between.

    Freezing resets the counts by which Python decides when to make a full collection. A program
    that does little but call would never make one, and its garbage in cycles would stay.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._due_s = clock() + _FIRST_S
        """When a call begins with a full collection."""

    @contextmanager
    def freeze(self) -> Generator[None]:
        """Do as `freeze_heap` does, after a full collection if one is due."""
        # What the caller has frozen, or does not want to be collected, is left alone.
        if gc.isenabled() and not gc.get_freeze_count() and self._clock() >= self._due_s:
            began_s = self._clock()
            gc.collect()
            ended_s = self._clock()
            self._due_s = ended_s + (ended_s - began_s) / _SHARE
        with freeze_heap():
            yield
