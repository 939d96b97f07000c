"""Threads with a bounded queue, for texts too long to tokenize on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pagedray.errors import OverloadedError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["TextPool"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

_NUM_THREADS = 2
_MAX_WAITING = 64


class TextPool:
    """Runs functions in threads; used from one event loop."""

    def __init__(self, *, num_threads: int = _NUM_THREADS, max_waiting: int = _MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pagedray-text")
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._free = asyncio.Semaphore(num_threads)
        self._num_waiting = 0
        self._is_closed = False

    async def run_in_thread(
        self, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Return the result of `work`. Raises OverloadedError if the queue is full."""
        if self._num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"The queue of {self._num_waiting} long texts to tokenize is full."
            )
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        if self._is_closed:
            self._free.release()
            raise ShuttingDownError
        future = self._threads.submit(work, *args, **kwargs)
        self._release_after(future)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Reject new work, wait for the running work and end the threads."""
        self._is_closed = True
        for _ in range(self._num_threads):
            await self._free.acquire()
        for _ in range(self._num_threads):
            self._free.release()
        self._threads.shutdown()

    def _release_after(self, future: Future[Result]) -> None:
        # A thread is free when its work ends, not when its caller is cancelled.
        loop = asyncio.get_running_loop()

        def release(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._free.release)

        future.add_done_callback(release)
