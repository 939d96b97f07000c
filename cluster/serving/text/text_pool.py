"""Threads for texts too long to tokenize on the event loop, which tenants share in turn."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from cluster.serving.intake.turns import Turns
from pagedray.errors import OverloadedError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["TextPool"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

_NUM_THREADS = 3
_MAX_WAITING = 64


class TextPool:
    """Runs functions in threads; used from one event loop.

    The tenant whose texts have taken the least time comes next, and no tenant has all threads.
    """

    def __init__(self, *, num_threads: int = _NUM_THREADS, max_waiting: int = _MAX_WAITING) -> None:
        """Tenants share `max_waiting` places to wait; even if others have all, one has a few."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pagedray-text")
        self._max_waiting = max_waiting
        self._turns = Turns(num_threads, num_per_tenant=max(1, num_threads - 1))
        self._running: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def run_in_thread(
        self, tenant: str, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Return the result of `work`. Raises OverloadedError if the tenant's queue is full."""
        turns = self._turns
        num_waiting = turns.num_waiting(tenant)
        if num_waiting >= max(1, self._max_waiting // max(1, turns.num_tenants)):
            raise OverloadedError(
                f"The queue of {num_waiting} long texts of this tenant to tokenize is full."
            )
        await turns.wait_turn(tenant)
        if self._is_closed:
            turns.end_turn(tenant, 0.0)
            raise ShuttingDownError
        started_s = time.monotonic()
        try:
            future = self._threads.submit(work, *args, **kwargs)
        except RuntimeError:
            # The system has no more threads.
            turns.end_turn(tenant, 0.0)
            raise
        self._end_turn_after(future, tenant, started_s)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Reject new work, wait for the running work and end the threads."""
        self._is_closed = True
        while self._running:
            await asyncio.wait(self._running)
        self._threads.shutdown()

    def _end_turn_after(self, future: Future[Result], tenant: str, started_s: float) -> None:
        # A thread is free when its work ends, not when its caller is cancelled.
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._running.add(ended)

        def end_turn() -> None:
            self._running.discard(ended)
            ended.set_result(None)
            self._turns.end_turn(tenant, time.monotonic() - started_s)

        def note_done(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end_turn)

        future.add_done_callback(note_done)
