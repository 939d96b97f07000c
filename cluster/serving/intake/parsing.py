"""When long requests are parsed, which holds the event loop that all streams share."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

from cluster.serving.intake.steps import Steps, finish
from cluster.serving.intake.tenant_turns import TenantTurns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Parsing"]

_SHORT_BYTES = 2**13
"""Requests up to this size take about a millisecond and are parsed at once."""
_MOST_AT_ONCE_S = 0.001
"""How long requests are parsed without a pause."""
_PAUSE_RATIO = 3.0
"""How long a pause is, compared with the work before it."""
_RECEIVE_S_PER_BYTE = 3e-9
"""What it took to receive a request, which delays others as much as parsing it."""

Result = TypeVar("Result")


class Parsing:
    """Parses one long request at a time, the one of the tenant that has taken the least time.

    While others wait for tokens, it pauses for three times as long as it worked, so that three
    quarters of the event loop's time are left for them.
    """

    def __init__(
        self,
        *,
        has_streams: Callable[[], bool],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`has_streams` returns whether anyone waits for tokens."""
        self._has_streams = has_streams
        self._clock = clock
        self._turns = TenantTurns(1, num_per_tenant=1)
        self._unpaused_s = 0.0
        """The work since the last pause."""

    async def run(
        self,
        tenant: str,
        num_bytes: int,
        steps: Steps[Result],
        *,
        check_client: Callable[[], Awaitable[None]] | None = None,
        num_received: int | None = None,
    ) -> Result:
        """Return the result of the steps that read a tenant's request of this many bytes.

        The tenant is charged for receiving `num_received` of them; None is all.
        `check_client` is called when the turn of a long request has come, and raises if the client
        has disconnected meanwhile.
        """
        if num_bytes <= _SHORT_BYTES:
            return finish(steps)
        await self._turns.wait_turn(tenant)
        used_s = (num_bytes if num_received is None else num_received) * _RECEIVE_S_PER_BYTE
        self._unpaused_s += used_s
        try:
            if check_client is not None:
                await check_client()
            while True:
                started_s = self._clock()
                try:
                    next(steps)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                finally:
                    step_s = self._clock() - started_s
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
        worked_s, self._unpaused_s = self._unpaused_s, 0.0
        return worked_s * _PAUSE_RATIO if self._has_streams() else 0.0
