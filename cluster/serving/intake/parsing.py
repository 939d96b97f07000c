"""When long requests are parsed, which holds the event loop that all streams share."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

from cluster.serving.intake.steps import Steps, finish
from cluster.serving.intake.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Parsing"]

_SHORT_BYTES = 2**13
"""Requests up to this size take about a millisecond and are parsed at once."""
_MOST_AT_ONCE_S = 0.002

Result = TypeVar("Result")


class Parsing:
    """Parses one long request at a time, the one of the tenant that has taken the least time.

    It pauses for as long as it worked, so that half of the event loop's time is left for everything
    else.
    """

    def __init__(self) -> None:
        self._turns = Turns(1, num_per_tenant=1)

    async def run(self, tenant: str, num_bytes: int, steps: Steps[Result]) -> Result:
        """Return the result of the steps that read a tenant's request of so many bytes."""
        if num_bytes <= _SHORT_BYTES:
            return finish(steps)
        await self._turns.wait_turn(tenant)
        clock = _Clock()
        try:
            return await _run(steps, clock)
        finally:
            # The next request waits for the pause, the caller does not.
            loop = asyncio.get_running_loop()
            loop.call_later(clock.unpaused_s, self._turns.end_turn, tenant, clock.used_s)


class _Clock:
    """How long some steps took."""

    __slots__ = ("unpaused_s", "used_s")

    def __init__(self) -> None:
        self.used_s = 0.0
        self.unpaused_s = 0.0
        """Since the last pause."""

    def add(self, seconds: float) -> None:
        self.used_s += seconds
        self.unpaused_s += seconds


async def _run(steps: Generator[None, None, Result], clock: _Clock) -> Result:
    while True:
        started_s = time.perf_counter()
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            clock.add(time.perf_counter() - started_s)
        if clock.unpaused_s >= _MOST_AT_ONCE_S:
            await asyncio.sleep(clock.unpaused_s)
            clock.unpaused_s = 0.0
