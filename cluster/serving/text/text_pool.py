"""Threads for texts that are too long to tokenize on the event loop, shared by tenants in turn."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from cluster.serving.intake.tenant_turns import TenantTurns
from cluster.serving.text.text_budgets import TextBudgets
from cluster.serving.text.thread_pauses import ThreadPauses
from pagedray.errors import OverloadedError, ShuttingDownError
from pagedray.machine import lower_priority, start_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["TextPool"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

_NUM_THREADS = 3
_MAX_WAITING = 64
_NICENESS = 19
"""Priority of texts of a tenant that has used up its budget."""


class TextPool:
    """Runs functions in threads; used from one event loop.

    The tenant with the least used time comes next, and no tenant has all threads. The texts of a
    tenant that has used up its budget are tokenized at the lowest priority, so that they do not
    slow down the engine on a busy machine; its conversations are rendered with long pauses while
    others wait for tokens.
    """

    def __init__(
        self,
        *,
        num_threads: int = _NUM_THREADS,
        max_waiting: int = _MAX_WAITING,
        do_others_wait: Callable[[str], bool] = lambda tenant: True,
    ) -> None:
        """Up to `max_waiting` texts wait: an equal share of each tenant, and at least one.

        `do_others_wait` returns whether tenants other than the given one wait for tokens.
        """
        self._threads = start_threads(num_threads, name="pagedray-text")
        self._low_threads = start_threads(
            num_threads,
            name="pagedray-text-low",
            initializer=lambda: lower_priority(threading.get_native_id(), _NICENESS),
        )
        self._budgets = TextBudgets()
        self._do_others_wait = do_others_wait
        self._rendering = threading.Lock()
        self._max_waiting = max_waiting
        self._turns = TenantTurns(num_threads, num_per_tenant=max(1, num_threads - 1))
        self._running: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def run_in_thread(
        self, tenant: str, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Return the result of `work`. Raises OverloadedError if the tenant's queue is full."""
        await self._take_turn(tenant)
        return await self._run(tenant, self._threads, functools.partial(work, *args, **kwargs))

    async def render_in_thread(
        self, tenant: str, render: Callable[[ThreadPauses], Result]
    ) -> Result:
        """Return the result of `render`, which holds the GIL between pauses.

        Raises OverloadedError if the tenant's queue is full.
        """
        await self._take_turn(tenant)
        are_long = self._budgets.is_spent(tenant) and self._do_others_wait(tenant)
        # With several renderings at once, the event loop would wait for the GIL behind each.
        # Renderings with long pauses use little CPU time, so others need not wait for them.
        one_at_a_time = nullcontext() if are_long else self._rendering

        def work() -> Result:
            with one_at_a_time:
                return render(ThreadPauses(are_long=are_long))

        return await self._run(tenant, self._threads, work)

    async def encode_in_thread(self, tenant: str, encode: Callable[[], Result]) -> Result:
        """Return the result of `encode`, which must hold the GIL only briefly.

        A thread of low priority that held it would make other threads wait. Raises OverloadedError
        if the tenant's queue is full.
        """
        await self._take_turn(tenant)
        is_low = self._budgets.is_spent(tenant)
        return await self._run(tenant, self._low_threads if is_low else self._threads, encode)

    async def _take_turn(self, tenant: str) -> None:
        turns = self._turns
        num_waiting = turns.num_waiting(tenant)
        if num_waiting >= max(1, self._max_waiting // max(1, turns.num_tenants)):
            raise OverloadedError(
                f"{num_waiting} long texts of this tenant are waiting for the tokenizer; retry "
                "later."
            )
        await turns.wait_turn(tenant)
        if self._is_closed:
            turns.end_turn(tenant, 0.0)
            raise ShuttingDownError

    async def _run(
        self, tenant: str, threads: ThreadPoolExecutor, work: Callable[[], Result]
    ) -> Result:
        """Run work in the turn of a tenant, which ends with it."""
        timed = _TimedWork(work)
        started_s = time.monotonic()
        future = threads.submit(timed.run)
        self._end_turn_after(future, tenant, started_s, timed)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Reject new work, wait for the running work and end the threads."""
        self._is_closed = True
        while self._running:
            await asyncio.wait(self._running)
        self._threads.shutdown()
        self._low_threads.shutdown()

    def _end_turn_after(
        self, future: Future[Result], tenant: str, started_s: float, timed: _TimedWork[Result]
    ) -> None:
        # A thread is free when its work ends, not when its caller is cancelled.
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._running.add(ended)

        def end_turn() -> None:
            self._running.discard(ended)
            ended.set_result(None)
            self._budgets.charge(tenant, timed.cpu_s)
            self._turns.end_turn(tenant, time.monotonic() - started_s)

        def note_done(_: Future[Result]) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(end_turn)

        future.add_done_callback(note_done)


class _TimedWork(Generic[Result]):
    """A function, and the CPU time that it took."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self.cpu_s = 0.0

    def run(self) -> Result:
        """Return its result."""
        began_s = time.thread_time()
        try:
            return self._work()
        finally:
            self.cpu_s = time.thread_time() - began_s
