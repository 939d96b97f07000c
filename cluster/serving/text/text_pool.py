"""Threads for texts that are too long to read on the event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pagedray.errors import OverloadedError, ShuttingDownError
from pagedray.machine import start_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["TextPool"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

_NUM_THREADS = 3
_MAX_WAITING = 64


class _Line:
    """The texts of one tenant."""

    def __init__(self, num_threads: int) -> None:
        self.free = asyncio.Semaphore(num_threads)
        self.num_waiting = 0
        self.num_texts = 0


class TextPool:
    """Runs functions in threads, of which no tenant has all; used from one event loop."""

    def __init__(self, *, num_threads: int = _NUM_THREADS, max_waiting: int = _MAX_WAITING) -> None:
        """Up to `max_waiting` texts wait: an equal share of each tenant, and at least one."""
        self._threads = start_threads(num_threads, name="pagedray-text")
        self._num_per_tenant = max(1, num_threads - 1)
        self._max_waiting = max_waiting
        self._lines: dict[str, _Line] = {}
        self._running: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def run_in_thread(
        self, tenant: str, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Return the result of `work`. Raises OverloadedError if the tenant's queue is full."""
        line = self._lines.setdefault(tenant, _Line(self._num_per_tenant))
        if line.num_waiting >= max(1, self._max_waiting // len(self._lines)):
            raise OverloadedError(
                f"{line.num_waiting} long texts of this tenant are waiting for the tokenizer; "
                "retry later."
            )
        line.num_texts += 1
        line.num_waiting += 1
        try:
            await line.free.acquire()
        except BaseException:
            self._leave(tenant, line)
            raise
        finally:
            line.num_waiting -= 1
        if self._is_closed:
            line.free.release()
            self._leave(tenant, line)
            raise ShuttingDownError
        future = self._threads.submit(work, *args, **kwargs)
        self._end_after(future, tenant, line)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Reject new work, wait for the running work and end the threads."""
        self._is_closed = True
        while self._running:
            await asyncio.wait(self._running)
        self._threads.shutdown()

    def _end_after(self, future: Future[Result], tenant: str, line: _Line) -> None:
        # A thread is free when its work ends, not when its caller is cancelled.
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._running.add(ended)

        def end() -> None:
            self._running.discard(ended)
            ended.set_result(None)
            line.free.release()
            self._leave(tenant, line)

        def note_done(_: Future[Result]) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(end)

        future.add_done_callback(note_done)

    def _leave(self, tenant: str, line: _Line) -> None:
        line.num_texts -= 1
        if not line.num_texts:
            del self._lines[tenant]
