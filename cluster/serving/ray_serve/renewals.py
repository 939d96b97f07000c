"""Renews, from the caller's process, the leases of the streams that are still read.

A replica cannot know which are: Serve loses some cancels, and does not report streams that were
dropped or callers that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING
from weakref import ref

from cluster.serving.ray_serve.replica_calls import call_replica

if TYPE_CHECKING:
    from ray.serve._private.replica_result import ReplicaResult
    from ray.serve.request_router import RunningReplica

__all__ = ["Renewals"]

logger = logging.getLogger(__name__)


class Renewals:
    """The open streams of one router. Used from the router's event loop only."""

    def __init__(self, *, period_s: float, idle_s: float) -> None:
        """Streams are renewed every `period_s` unless they have not been read for `idle_s`."""
        self._period_s = period_s
        self._idle_s = idle_s
        self._open: dict[_StreamReads, tuple[RunningReplica, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._renewals: set[asyncio.Task[None]] = set()

    def renew_stream(self, result: ReplicaResult, replica: RunningReplica, call_id: str) -> None:
        """Renew a stream until it ends or is no longer read."""
        loop = asyncio.get_running_loop()
        reader = _StreamReads(result)
        self._open[reader] = replica, call_id

        def forget(_: object) -> None:
            # Ray calls this in its own thread, also when the event loop is closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._open.pop, reader, None)

        result.add_done_callback(forget)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._renew_on())

    async def _renew_on(self) -> None:
        while self._open:
            await asyncio.sleep(self._period_s)
            read: dict[RunningReplica, list[str]] = {}
            for reader, (replica, call_id) in self._open.items():
                if reader.idle_s() < self._idle_s:
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


class _StreamReads:
    """Records when a stream is read, by wrapping the methods from which handles take items."""

    def __init__(self, result: ReplicaResult) -> None:
        self._kind = type(result)
        self._result = ref(result)
        self._is_waiting = False
        self._read_s = time.monotonic()
        # Handles call these on the instance, so instance attributes override them.
        result.__anext__ = self._anext  # type: ignore[method-assign]  # see above
        result.__next__ = self._next  # type: ignore[method-assign]  # see above

    def idle_s(self) -> float:
        """Return the time since the last read; 0 during a read."""
        return 0.0 if self._is_waiting else time.monotonic() - self._read_s

    async def _anext(self) -> object:
        result = self._result()
        assert result is not None
        self._is_waiting = True
        try:
            return await self._kind.__anext__(result)
        finally:
            self._is_waiting, self._read_s = False, time.monotonic()

    def _next(self) -> object:
        result = self._result()
        assert result is not None
        self._is_waiting = True
        try:
            return self._kind.__next__(result)
        finally:
            self._is_waiting, self._read_s = False, time.monotonic()
