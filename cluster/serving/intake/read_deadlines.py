"""Ends the wait for messages that do not arrive, with one timer for all calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from pagedray.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["ReadDeadlines"]

Result = TypeVar("Result")


class ReadDeadlines:
    """Waits for messages with the same time limit. Used from the event loop only."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadlines: dict[asyncio.Task[object], float] = {}
        """The deadlines of the waiting tasks, the earliest first."""
        self._timer: asyncio.TimerHandle | None = None

    async def wait_for(self, message: Awaitable[Result]) -> Result:
        """Return the message. Raises DeadlineError if it does not come in time."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._deadlines[task] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s, self._end_late, loop)
        try:
            return await message
        except asyncio.CancelledError:
            if task in self._deadlines:
                raise
            task.uncancel()
            raise DeadlineError(
                f"The message did not arrive within {self._timeout_s:g} s (--read-timeout-s)."
            ) from None
        finally:
            self._deadlines.pop(task, None)

    def _end_late(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now_s = loop.time()
        for task, deadline_s in list(self._deadlines.items()):
            if deadline_s > now_s:
                self._timer = loop.call_at(deadline_s, self._end_late, loop)
                break
            del self._deadlines[task]
            task.cancel()
