"""Says to replicas, from the process of a caller, which of its streams are still read.

A replica cannot know: Serve loses some cancels, and tells nobody of a stream that was dropped or of
a caller that died.
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
    """The streams that one router has sent to replicas. Used from the router's event loop only."""

    def __init__(self, *, period_s: float, idle_s: float) -> None:
        """Streams are renewed each `period_s` unless nobody has read them for `idle_s`."""
        self._period_s = period_s
        self._idle_s = idle_s
        self._open: dict[_StreamReads, tuple[RunningReplica, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._renewals: set[asyncio.Task[None]] = set()

    def renew_stream(self, result: ReplicaResult, replica: RunningReplica, call_id: str) -> None:
        """Renew a stream from now on, until it ends or is read no more."""
        loop = asyncio.get_running_loop()
        reader = _StreamReads(result)
        self._open[reader] = replica, call_id

        def forget(_: object) -> None:
            # Ray calls this in a thread of its own, also when all comes to its end.
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
            # Nobody waits: one that does not answer would delay the others.
            for replica, call_ids in read.items():
                renewal = asyncio.create_task(self._renew(replica, call_ids))
                self._renewals.add(renewal)
                renewal.add_done_callback(self._renewals.discard)

    async def _renew(self, replica: RunningReplica, call_ids: list[str]) -> None:
        try:
            await asyncio.wait_for(call_replica(replica, "renew", call_ids), self._period_s)
        except Exception as error:
            # It has died, and its callers are told so, or the next time will do.
            logger.debug("%s was not told which calls to go on with: %s", replica, error)


class _StreamReads:
    """Whoever reads a stream, seen from where Serve's handles take its items."""

    def __init__(self, result: ReplicaResult) -> None:
        self._kind = type(result)
        self._result = ref(result)
        self._is_waiting = False
        self._read_s = time.monotonic()
        # Handles call these by name, not as the language does for its own loops.
        result.__anext__ = self._anext  # type: ignore[method-assign]  # see above
        result.__next__ = self._next  # type: ignore[method-assign]  # see above

    def idle_s(self) -> float:
        """Return for how long nobody has waited for an item."""
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
