"""Closes the engine of a program that ends without closing it."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ExitClose"]


class ExitClose:
    """Calls `close` when the interpreter exits, unless it is cancelled before.

    The last handler of an exit runs first. Ray, which has registered its own when an engine runs,
    ends the ranks: an engine that still runs would take that for a fault, and start Ray again to
    ask for its cause.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._process_id = os.getpid()
        atexit.register(self._run)

    def cancel(self) -> None:
        """Do nothing at the exit. May be called twice."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        # A fork has the handlers of its parent, but not its threads.
        if os.getpid() == self._process_id:
            self._close()
