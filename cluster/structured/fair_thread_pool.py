"""A thread pool that tenants share fairly."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pagedray.errors import OverloadedError, ShuttingDownError
from pagedray.machine import start_threads

__all__ = ["FairThreadPool"]

Result = TypeVar("Result")
# Any: tasks of any result.
_Task = tuple[Future[Any], Callable[[], Any]]


class FairThreadPool:
    """Runs the compilations of tenants in turn. Any thread may submit tasks."""

    def __init__(
        self, num_threads: int, *, max_running: int, max_open: int, max_open_total: int, what: str
    ) -> None:
        """A tenant may use `max_running` threads and have `max_open` tasks that have not ended.

        Errors call them `what`, a plural.
        """
        assert max_running < num_threads
        self._num_threads = num_threads
        self._max_running = max_running
        self._max_open = max_open
        self._max_open_total = max_open_total
        self._what = what
        self._threads = start_threads(num_threads, name="pagedray-compilations")
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        # In the order of turns.
        self._waiting: dict[str, deque[_Task]] = {}
        # A future is completed by the thread that removes it from this set.
        self._open: set[Future[Any]] = set()  # Any: of any result
        self._is_closed = False

    def submit_task(self, tenant: str, task: Callable[[], Result]) -> Future[Result]:
        """Run a task of a tenant; the future cannot be cancelled.

        Raises OverloadedError or ShuttingDownError.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError
            self._check_room(tenant)
            self._open.add(future)
            self._waiting.setdefault(tenant, deque()).append((future, task))
            self._start_tasks()
        return future

    def close(self) -> None:
        """End all futures with a ShuttingDownError at once. May be called twice.

        Tasks that wait never run, and the results of those that run are dropped.
        """
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            ended = tuple(self._open)
            self._open.clear()
        for future in ended:
            future.set_exception(ShuttingDownError())
        self._threads.shutdown(wait=False)

    def join(self) -> None:
        """Wait for the running tasks, after `close`."""
        self._threads.shutdown()

    def _check_room(self, tenant: str) -> None:
        num_open = self._running[tenant] + len(self._waiting.get(tenant, ()))
        num_total = self._running.total() + sum(map(len, self._waiting.values()))
        if num_open >= self._max_open:
            raise OverloadedError(
                f"{num_open} {self._what} of this tenant are being compiled, the maximum; retry "
                "later."
            )
        if num_total >= self._max_open_total:
            raise OverloadedError(
                f"{num_total} {self._what} are being compiled, the maximum; retry later."
            )

    def _start_tasks(self) -> None:
        """Start the tasks that may run. Called under the lock."""
        while self._running.total() < self._num_threads:
            allowed = [one for one in self._waiting if self._running[one] < self._max_running]
            if not allowed:
                return
            tenant = min(allowed, key=self._running.__getitem__)
            queue = self._waiting.pop(tenant)
            future, task = queue.popleft()
            if queue:
                # The tenant's next turn comes after the others'.
                self._waiting[tenant] = queue
            self._running[tenant] += 1
            self._threads.submit(self._run, tenant, future, task)

    def _run(self, tenant: str, future: Future[Result], task: Callable[[], Result]) -> None:
        try:
            result = task()
        # Any error goes to the waiting thread, as in every executor.
        except BaseException as error:
            if self._may_end(future):
                future.set_exception(error)
        else:
            if self._may_end(future):
                future.set_result(result)
        finally:
            with self._lock:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                if not self._is_closed:
                    self._start_tasks()

    def _may_end(self, future: Future[Result]) -> bool:
        """Return whether the caller ends a future; otherwise `close` has done so."""
        with self._lock:
            if future not in self._open:
                return False
            self._open.remove(future)
            return True
