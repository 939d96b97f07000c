"""A few threads that work for tenants in turn, so that none keeps them from the others."""

from __future__ import annotations

import threading
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from pagedray.errors import OverloadedError, ShuttingDownError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TenantThreads"]

Result = TypeVar("Result")
# Any: tasks of any result.
_Task = tuple[Future[Any], "Callable[[], Any]"]


class TenantThreads:
    """Runs what tenants ask for; any thread may ask."""

    def __init__(
        self, num_threads: int, *, most_running: int, most_open: int, most_open_of_all: int
    ) -> None:
        """A tenant has `most_running` of the threads, and `most_open` tasks that have not ended."""
        assert most_running < num_threads
        self._num_threads = num_threads
        self._most_running = most_running
        self._most_open = most_open
        self._most_open_of_all = most_open_of_all
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pagedray-grammars")
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        # Who waits, from the one whose turn it is.
        self._waiting: dict[str, deque[_Task]] = {}
        self._is_closed = False

    def submit(self, tenant: str, task: Callable[[], Result]) -> Future[Result]:
        """Have a task run. Raises OverloadedError or ShuttingDownError."""
        future: Future[Result] = Future()
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError
            self._check_room(tenant)
            self._waiting.setdefault(tenant, deque()).append((future, task))
            self._start()
        return future

    def close(self) -> None:
        """Run nothing more; what waits is cancelled. May be called twice."""
        with self._lock:
            self._is_closed = True
            waiting = [future for tasks in self._waiting.values() for future, _ in tasks]
            self._waiting.clear()
        for future in waiting:
            future.cancel()
        self._threads.shutdown(wait=False)

    def join(self) -> None:
        """Wait until nothing runs any more, after `close`."""
        self._threads.shutdown()

    def _check_room(self, tenant: str) -> None:
        num_open = self._running[tenant] + len(self._waiting.get(tenant, ()))
        num_of_all = self._running.total() + sum(map(len, self._waiting.values()))
        if num_open >= self._most_open:
            raise OverloadedError(
                f"{num_open} structures of this tenant are being compiled, which is all that may."
            )
        if num_of_all >= self._most_open_of_all:
            raise OverloadedError(
                f"{num_of_all} structures are being compiled, which is all that may."
            )

    def _start(self) -> None:
        """Start whatever may run now; under the lock."""
        while self._running.total() < self._num_threads:
            allowed = [one for one in self._waiting if self._running[one] < self._most_running]
            if not allowed:
                return
            tenant = min(allowed, key=self._running.__getitem__)
            tasks = self._waiting.pop(tenant)
            future, task = tasks.popleft()
            if tasks:
                # Behind the others.
                self._waiting[tenant] = tasks
            self._running[tenant] += 1
            self._threads.submit(self._run, tenant, future, task)

    def _run(self, tenant: str, future: Future[Result], task: Callable[[], Result]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                _settle(future, task)
        finally:
            with self._lock:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                if not self._is_closed:
                    self._start()


def _settle(future: Future[Result], task: Callable[[], Result]) -> None:
    try:
        result = task()
    # Whoever waits for it is told, as with any executor.
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
