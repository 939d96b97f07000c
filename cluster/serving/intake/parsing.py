"""When long requests are parsed, which holds the event loop that all streams share."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from cluster.serving.intake.steps import Steps, finish
from cluster.serving.intake.turns import Turns

__all__ = ["Parsing"]

_SHORT_BYTES = 2**13
"""Requests up to this size take about a millisecond and are parsed at once."""
_MOST_AT_ONCE_S = 0.002
"""How long requests are parsed without a pause."""

Result = TypeVar("Result")


class Parsing:
    """Parses one long request at a time, the one of the tenant that has taken the least time.

    It pauses for as long as it worked, so that half of the event loop's time is left for everything
    else.
    """

    def __init__(self) -> None:
        self._turns = Turns(1, num_per_tenant=1)
        self._unpaused_s = 0.0
        """The work since the last pause."""

    async def run(self, tenant: str, num_bytes: int, steps: Steps[Result]) -> Result:
        """Return the result of the steps that read a tenant's request of so many bytes."""
        if num_bytes <= _SHORT_BYTES:
            return finish(steps)
        await self._turns.wait_turn(tenant)
        used_s = 0.0
        try:
            while True:
                started_s = time.perf_counter()
                try:
                    next(steps)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                finally:
                    step_s = time.perf_counter() - started_s
                    used_s += step_s
                    self._unpaused_s += step_s
                if self._unpaused_s >= _MOST_AT_ONCE_S:
                    await asyncio.sleep(self._take_pause())
        finally:
            if self._unpaused_s < _MOST_AT_ONCE_S:
                self._turns.end_turn(tenant, used_s)
            else:
                # The next request waits for the pause, the caller does not.
                loop = asyncio.get_running_loop()
                loop.call_later(self._take_pause(), self._turns.end_turn, tenant, used_s)

    def _take_pause(self) -> float:
        """Return how long to pause from here on."""
        pause_s, self._unpaused_s = self._unpaused_s, 0.0
        return pause_s
