"""The leases of a replica's calls: a stream is cancelled when its caller stops renewing it.

Ray Serve loses some cancels, and does not notify a replica when its caller's process has died.
Plain asyncio; `renewals` is the caller's side.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

__all__ = ["Leases"]

logger = logging.getLogger(__name__)

_CHECKS_PER_LEASE = 10


class Leases:
    """The leased calls of one replica. Used from the event loop only."""

    def __init__(self, lease_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """A call is cancelled when it has not been renewed for half of `lease_s`.

        Its caller stops renewing it when it has not been read for `lease_s`.
        """
        self._unheard_s = lease_s / 2
        self._clock = clock
        self._leases: set[_Lease] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        # Another router than ours does not renew calls.
        self._are_renewed = False

    @contextmanager
    def held(self, call_id: str | None) -> Iterator[None]:
        """Cancel the current task if its call is not renewed while the block runs.

        A call without an id cannot be renewed and has no lease.
        """
        if call_id is None:
            yield
            return
        task = asyncio.current_task()
        assert task is not None
        lease = _Lease(call_id, task, self._clock())
        self._leases.add(lease)
        self._schedule_check()
        try:
            yield
        finally:
            self._leases.discard(lease)

    def renew(self, call_ids: Collection[str]) -> None:
        """Renew the leases of calls."""
        self._are_renewed = True
        now_s = self._clock()
        for lease in self._leases:
            if lease.call_id in call_ids:
                lease.renewed_s = now_s

    def _schedule_check(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            period_s = self._unheard_s / _CHECKS_PER_LEASE
            self._due_s = self._clock() + period_s
            self._timer = loop.call_later(period_s, self._check)

    def _check(self) -> None:
        self._timer = None
        # Renewals that arrived while this process was paused have not been read yet.
        late_s = self._clock() - self._due_s
        if late_s > self._unheard_s / _CHECKS_PER_LEASE:
            for lease in self._leases:
                lease.renewed_s += late_s
        begin_s = self._clock() - self._unheard_s
        late = {one for one in self._leases if self._are_renewed and one.renewed_s < begin_s}
        for lease in late:
            logger.warning("Cancelled a stream because its caller stopped renewing the lease.")
            lease.task.cancel()
        self._leases -= late
        if self._leases:
            self._schedule_check()


class _Lease:
    """The lease of a call."""

    __slots__ = ("call_id", "renewed_s", "task")

    def __init__(self, call_id: str, task: asyncio.Task[object], now_s: float) -> None:
        self.call_id = call_id
        self.task = task
        self.renewed_s = now_s
