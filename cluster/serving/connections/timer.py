"""A timer of a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["Timer"]


class Timer:
    """Calls a function after a time, unless it is stopped before."""

    __slots__ = ("_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """Whether the function is still to be called."""
        return self._handle is not None

    def start(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after `delay_s`; a timer that is running is left as it is."""
        # The timer keeps no function of its owner while it is not running: objects that refer to
        # one another are freed late.
        if self._handle is None:
            self._handle = self._loop.call_later(delay_s, self._end, action)

    def stop(self) -> None:
        """Do not call the function."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self, action: Callable[[], None]) -> None:
        self._handle = None
        action()
