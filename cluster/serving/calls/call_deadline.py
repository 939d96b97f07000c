"""The deadline of a generation call, which ends it even while the engine runs no steps."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pagedray.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallDeadline"]


class CallDeadline:
    """Fails a call once its deadline has passed, if it has one."""

    def __init__(self, deadline_s: float | None, fail: Callable[[DeadlineError], None]) -> None:
        """`deadline_s` is a time of the monotonic clock; `fail` is called on the event loop."""
        self._deadline_s = deadline_s
        self._timer: asyncio.TimerHandle | None = None
        # The engine ends late requests too, but only between steps and while it has ranks.
        if deadline_s is not None:
            delay_s = deadline_s - time.monotonic()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, lambda: fail(_error()))

    def check(self) -> None:
        """Raise DeadlineError if the deadline has passed."""
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            raise _error()

    def cancel(self) -> None:
        """Do not fail the call, which has ended. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _error() -> DeadlineError:
    return DeadlineError("The deadline passed before the request was finished.")
