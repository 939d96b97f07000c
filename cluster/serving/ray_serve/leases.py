"""The leases of a replica's calls: a stream ends when nobody says any more that it is read.

Ray Serve loses some cancels, and a replica is not told when the process that called it has died.
Plain asyncio; who says so, and how, is in serve_renewals.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["Leases"]

logger = logging.getLogger(__name__)

_LOOKS_PER_LEASE = 10


class Leases:
    """The calls of one replica that are renewed. Used from the event loop only."""

    def __init__(self, lease_s: float) -> None:
        """A call ends when it has not been renewed for half of `lease_s`.

        Those who renew it let the whole of it pass without a reader.
        """
        self._unheard_s = lease_s / 2
        self._leases: set[_Lease] = set()
        self._timer: asyncio.TimerHandle | None = None
        # Whoever configures another router has calls that nobody renews.
        self._are_renewed = False

    @contextmanager
    def held(self, call_id: str | None) -> Iterator[None]:
        """Cancel the current task if its call is not renewed while the block runs.

        Without an id it is no call that anybody could renew.
        """
        if call_id is None:
            yield
            return
        task = asyncio.current_task()
        assert task is not None
        lease = _Lease(call_id, task)
        self._leases.add(lease)
        self._look_later()
        try:
            yield
        finally:
            self._leases.discard(lease)

    def renew(self, call_ids: Collection[str]) -> None:
        """Let calls run on: their callers wait for them."""
        self._are_renewed = True
        now_s = time.monotonic()
        for lease in self._leases:
            if lease.call_id in call_ids:
                lease.renewed_s = now_s

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._unheard_s / _LOOKS_PER_LEASE, self._look)

    def _look(self) -> None:
        self._timer = None
        begin_s = time.monotonic() - self._unheard_s
        late = {one for one in self._leases if self._are_renewed and one.renewed_s < begin_s}
        for lease in late:
            logger.warning("A stream ended, which nobody seems to read: it was not renewed.")
            lease.task.cancel()
        self._leases -= late
        if self._leases:
            self._look_later()


class _Lease:
    """One call, and what runs for it."""

    __slots__ = ("call_id", "renewed_s", "task")

    def __init__(self, call_id: str, task: asyncio.Task[object]) -> None:
        self.call_id = call_id
        self.task = task
        self.renewed_s = time.monotonic()
