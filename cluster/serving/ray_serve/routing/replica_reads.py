"""Reads of a replica's response: whether it is read, and an error that ends the reads.

Ray notices a dead replica but not an unresponsive replica, so a read of its response would wait
forever. This uses private parts of Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from cluster.serving.ray_serve.routing.errors import ReplicaDiedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ray.serve._private.replica_result import ReplicaResult

__all__ = ["ReplicaReads"]

Found = TypeVar("Found")


class ReplicaReads:
    """Wraps the methods by which Serve reads from a replica."""

    def __init__(
        self,
        result: ReplicaResult,
        note_accepted: Callable[[], None] | None = None,
        note_cancelled: Callable[[], None] | None = None,
        is_last: Callable[[Any], bool] | None = None,  # Any: items are the deployment's
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note_accepted` is called, from the router's thread, when the replica has the request.

        `note_cancelled` is called when Serve cancels a request that the replica has. `is_last`
        recognizes the last item of a complete stream; a stream that ends earlier raises
        ReplicaDiedError.
        """
        self._is_last = is_last
        self._is_complete = is_last is None
        self._kind = type(result)
        self._result = ref(result)
        self._note_accepted = note_accepted
        self._note_cancelled = note_cancelled
        # Serve also cancels requests that a replica rejects or has cancelled.
        self._is_at_replica = note_accepted is None
        self._error: Exception | None = None
        self._reader: asyncio.Task[Any] | None = None  # Any: tasks of Serve's
        self._is_waiting = False
        self._clock = clock
        self._read_s = clock()
        # Handles call these on the instance, so instance attributes override them.
        result.__anext__ = self._anext  # type: ignore[method-assign]  # see above
        result.__next__ = self._next  # type: ignore[method-assign]  # see above
        result.get_async = self._get  # type: ignore[method-assign]  # see above
        result.get_rejection_response = self._accepted  # type: ignore[method-assign, assignment]  # see above
        result.cancel = self._cancel  # type: ignore[method-assign]  # see above

    @property
    def result(self) -> ReplicaResult:
        """The response, while a caller has it."""
        result = self._result()
        assert result is not None
        return result

    def idle_s(self) -> float:
        """Return the time since the last read; 0 during a read."""
        return 0.0 if self._is_waiting else self._clock() - self._read_s

    def fail(self, error: Exception) -> None:
        """End the current read and all later reads with `error`.

        May be called from any thread. A read that blocks a thread is not interrupted.
        """
        # A read sets its task before it looks for the error, so it cannot miss both.
        self._error = error
        reader = self._reader
        if reader is not None:
            # The loop of a program with a handle may be closed, with the reader left in it.
            with contextlib.suppress(RuntimeError):
                reader.get_loop().call_soon_threadsafe(self._interrupt, reader)
        result = self._result()
        if result is not None:
            self._kind.cancel(result)

    def _interrupt(self, reader: asyncio.Task[Any]) -> None:  # Any: see above.
        if self._reader is reader:
            reader.cancel()

    async def _anext(self) -> object:
        self._is_waiting = True
        try:
            return self._noted(await self._read(self._kind.__anext__))
        except StopAsyncIteration:
            if not self._is_complete:
                raise ReplicaDiedError from None
            raise
        finally:
            self._is_waiting, self._read_s = False, self._clock()

    async def _get(self) -> object:
        return await self._read(self._kind.get_async)

    async def _accepted(self) -> object:
        response = await self._read(self._kind.get_rejection_response)
        if response is not None and response.accepted and self._note_accepted is not None:
            self._is_at_replica = True
            self._note_accepted()
        return response

    def _cancel(self) -> None:
        if self._is_at_replica and self._note_cancelled is not None:
            self._note_cancelled()
        result = self._result()
        if result is not None:
            self._kind.cancel(result)

    def _next(self) -> object:
        self._is_waiting = True
        try:
            if self._error is not None:
                raise self._error
            return self._noted(self._kind.__next__(self.result))
        except StopIteration:
            if not self._is_complete:
                raise ReplicaDiedError from None
            raise
        finally:
            self._is_waiting, self._read_s = False, self._clock()

    def _noted(self, item: Found) -> Found:
        if self._is_last is not None and self._is_last(item):
            self._is_complete = True
        return item

    async def _read(self, method: Callable[[ReplicaResult], Awaitable[Found]]) -> Found:
        reader = asyncio.current_task()
        assert reader is not None
        self._reader = reader
        try:
            if self._error is not None:
                raise self._error
            return await method(self.result)
        except asyncio.CancelledError:
            if reader.cancelling() == 0:
                self._is_at_replica = False
            if self._error is None or reader.uncancel() > 0:
                raise
            raise self._error from None
        finally:
            self._reader = None
