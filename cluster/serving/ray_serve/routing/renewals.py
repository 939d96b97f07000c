"""Renews, from the caller's process, the leases of the streams that are still read.

A replica cannot know which are: Serve loses some cancels, and does not report streams that were
dropped or callers that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextvars import Context
from typing import TYPE_CHECKING

from cluster.serving.ray_serve.routing.replica_calls import call_replica

if TYPE_CHECKING:
    from ray.serve.request_router import RunningReplica

    from cluster.serving.ray_serve.routing.replica_reads import ReplicaReads

__all__ = ["Renewals"]

logger = logging.getLogger(__name__)


class Renewals:
    """The open streams of one router. Used from the router's event loop only."""

    def __init__(self, *, period_s: float, idle_s: float) -> None:
        """Streams are renewed every `period_s` unless they have not been read for `idle_s`."""
        self._period_s = period_s
        self._idle_s = idle_s
        self._open: dict[ReplicaReads, tuple[RunningReplica, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._renewals: set[asyncio.Task[None]] = set()

    def renew_stream(self, reads: ReplicaReads, replica: RunningReplica, call_id: str) -> None:
        """Renew a stream until it ends or is no longer read."""
        loop = asyncio.get_running_loop()
        self._open[reads] = replica, call_id

        def forget(_: object) -> None:
            # Ray calls this in its own thread, also when the event loop is closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._open.pop, reads, None)

        reads.result.add_done_callback(forget)
        if self._task is None or self._task.done():
            # In a context of its own, since this is that of one of many requests.
            self._task = asyncio.create_task(self._renew_on(), context=Context())

    async def _renew_on(self) -> None:
        while self._open:
            await asyncio.sleep(self._period_s)
            read: dict[RunningReplica, list[str]] = {}
            for reads, (replica, call_id) in self._open.items():
                if reads.idle_s() < self._idle_s:
                    read.setdefault(replica, []).append(call_id)
            # In tasks: a replica that does not answer must not delay the others.
            for replica, call_ids in read.items():
                renewal = asyncio.create_task(self._renew(replica, call_ids))
                self._renewals.add(renewal)
                renewal.add_done_callback(self._renewals.discard)

    async def _renew(self, replica: RunningReplica, call_ids: list[str]) -> None:
        try:
            await asyncio.wait_for(call_replica(replica, "renew", call_ids), self._period_s)
        except Exception as error:
            # If the replica died, its callers get an error; otherwise the next renewal suffices.
            logger.debug("Could not renew the leases of calls to %s: %s", replica, error)
