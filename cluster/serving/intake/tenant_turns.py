"""Places that tenants take in turn: the one that has used them for the least time comes next."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

__all__ = ["TenantTurns"]


class _Line:
    """The calls of one tenant that wait for a place or have one."""

    __slots__ = ("num_running", "used_s", "waiting")

    def __init__(self, used_s: float) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.num_running = 0
        self.used_s = used_s


class TenantTurns:
    """Gives places to waiting calls. Used from one event loop.

    A tenant that has neither used nor awaited a place for a while is treated as the least served of
    the others, so that it has no credit.
    """

    def __init__(self, num_places: int, *, num_per_tenant: int) -> None:
        """A tenant may have `num_per_tenant` places at a time."""
        self._num_free = num_places
        self._num_per_tenant = num_per_tenant
        self._lines: dict[str, _Line] = {}

    @property
    def num_tenants(self) -> int:
        """Tenants that wait for a place or have one."""
        return len(self._lines)

    def num_waiting(self, tenant: str) -> int:
        """Return how many calls of a tenant wait."""
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.waiting)

    async def wait_turn(self, tenant: str) -> None:
        """Wait for a place; `end_turn` frees it."""
        line = self._lines.get(tenant)
        if line is None:
            used_s = min((other.used_s for other in self._lines.values()), default=0.0)
            line = self._lines[tenant] = _Line(used_s)
        if self._num_free and line.num_running < self._num_per_tenant:
            # Those who wait are at their tenant's limit.
            self._start(line)
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append(given)
        try:
            await given
        except asyncio.CancelledError:
            if given.cancelled():
                with suppress(ValueError):
                    line.waiting.remove(given)
                self._drop_idle(tenant, line)
            else:
                self.end_turn(tenant, 0.0)
            raise

    def end_turn(self, tenant: str, seconds: float) -> None:
        """Free a place that a call of the tenant has used for so long."""
        line = self._lines[tenant]
        line.num_running -= 1
        line.used_s += seconds
        self._num_free += 1
        self._drop_idle(tenant, line)
        while self._num_free and (following := self._next_line()) is not None:
            given = following.waiting.popleft()
            # A call that was just cancelled has not removed itself yet.
            if not given.cancelled():
                self._start(following)
                given.set_result(None)

    def _start(self, line: _Line) -> None:
        self._num_free -= 1
        line.num_running += 1

    def _next_line(self) -> _Line | None:
        """Return the least served tenant's of the lines that may have another place."""
        allowed = [
            line
            for line in self._lines.values()
            if line.waiting and line.num_running < self._num_per_tenant
        ]
        return min(allowed, key=lambda line: line.used_s, default=None)

    def _drop_idle(self, tenant: str, line: _Line) -> None:
        # A call that leaves late may have had a line that was dropped before.
        if not line.waiting and not line.num_running and self._lines.get(tenant) is line:
            del self._lines[tenant]
