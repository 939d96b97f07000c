"""The limits that frontends apply before and while they read requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from cluster.serving.intake.limits import IntakeLimits, request_size
from cluster.serving.intake.read_deadlines import ReadDeadlines
from cluster.serving.intake.reception import Reception
from pagedray.machine import start_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.config import EngineConfig

__all__ = ["Intake"]

_INLINE_BYTES = 2**15
"""The largest request that is parsed on the event loop."""

Result = TypeVar("Result")


class Intake:
    """The limits of a server on requests that it reads. Used from the event loop only."""

    def __init__(
        self,
        config: EngineConfig,
        limits: IntakeLimits,
        *,
        note_freed: Callable[[int], None],
    ) -> None:
        """`note_freed` is called with the bytes of each request when it is freed."""
        self.size = request_size(config, limits)
        self.read_timeout_s = limits.read_timeout_s
        self.reception = Reception(limits.received, wait_s=limits.wait_s, note_freed=note_freed)
        self.deadlines = ReadDeadlines(limits.read_timeout_s)
        self._parser = start_threads(1, name="pagedray-parser")

    async def parse(self, num_bytes: int, read: Callable[[], Result]) -> Result:
        """Return the result of `read`, which parses a request of this many bytes.

        Large requests are parsed in one thread, so that the event loop does not wait for them.
        """
        if num_bytes <= _INLINE_BYTES:
            return read()
        return await asyncio.get_running_loop().run_in_executor(self._parser, read)

    def close(self) -> None:
        """End the thread that parses large requests."""
        self._parser.shutdown(wait=False, cancel_futures=True)
