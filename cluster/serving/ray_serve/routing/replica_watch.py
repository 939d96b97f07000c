"""Asks replicas whether they respond, from the process that routes to them.

Serve's own health check notices a replica that hangs after half a minute or more, and its streams
stay open even then. The question is answered by the replica actor's main loop, which does not run
our code, so a busy engine or event loop of ours does not delay it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import Context
from typing import TYPE_CHECKING
from weakref import ref

from cluster.serving.ray_serve.routing.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ray.serve._private.common import ReplicaID
    from ray.serve.request_router import RunningReplica

__all__ = ["ReplicaWatch"]

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_LIMIT_S = 7.0
"""A shorter pause of a replica's process does not matter."""


class ReplicaWatch:
    """Watches the replicas of one router. Used from the router's event loop only."""

    def __init__(
        self,
        note_silent: Callable[[RunningReplica], None],
        *,
        period_s: float = _PERIOD_S,
        limit_s: float = _LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note_silent` is called when a replica has not responded for `limit_s`."""
        self._note_silent = note_silent
        self._period_s = period_s
        self._clock = clock
        self._pulse = Pulse["ReplicaID"](period_s=period_s, limit_s=limit_s)
        self._replicas: dict[ReplicaID, RunningReplica] = {}
        self._pings: dict[ReplicaID, asyncio.Task[None]] = {}
        self._ticked_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def watch_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Watch these replicas instead of the previous replicas."""
        self._replicas = {one.replica_id: one for one in replicas}
        for replica_id in self._pings.keys() - self._replicas.keys():
            self._pings.pop(replica_id).cancel()
        if self._replicas and (self._task is None or self._task.done()):
            self._ticked_s = self._clock()
            # In a context of its own, since this may be called in that of any request.
            self._task = asyncio.create_task(_tick_on(ref(self), self._period_s), context=Context())

    @property
    def silent(self) -> frozenset[ReplicaID]:
        """The replicas that do not respond; another object when they change."""
        return self._pulse.silent

    def tick(self) -> bool:
        """Report silent replicas and ask all again; return whether there are any replicas."""
        now_s = self._clock()
        elapsed_s, self._ticked_s = now_s - self._ticked_s, now_s
        for replica_id in self._pulse.tick(self._replicas.keys(), elapsed_s):
            logger.warning("Replica %s does not respond; avoiding it.", replica_id.unique_id)
            self._note_silent(self._replicas[replica_id])
        for replica_id, replica in self._replicas.items():
            ping = self._pings.get(replica_id)
            # An unanswered question is answered when the replica responds again.
            if ping is None or ping.done():
                self._pings[replica_id] = asyncio.create_task(self._ping(replica))
        return bool(self._replicas)

    async def _ping(self, replica: RunningReplica) -> None:
        try:
            await replica.get_queue_len(deadline_s=self._period_s)
        except Exception as error:
            logger.debug("Could not reach %s: %s", replica.replica_id, error)
            return
        if replica.replica_id in self._pulse.silent:
            logger.warning("Replica %s responds again.", replica.replica_id.unique_id)
        self._pulse.note_answer(replica.replica_id)


async def _tick_on(watch: ref[ReplicaWatch], period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        watching = watch()
        if watching is None or not watching.tick():
            return
        # A router that is no longer used is not kept alive.
        del watching
