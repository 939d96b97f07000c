"""The thread of a rank inside the server's process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IDLE_S", "RankThread"]

Result = TypeVar("Result")

IDLE_S = 0.05
"""Time without a call after which idle time is used; shorter pauses are between steps."""


class RankThread:
    """Runs calls in order, in one thread.

    A process does not wait for it at its end, unlike for a `ThreadPoolExecutor`, so that a rank
    that hangs does not keep the server from exiting.
    """

    def __init__(self) -> None:
        # Any: calls of any result.
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._use_idle_time: Callable[[], float | None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="pagedray-rank", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run a call after those submitted before."""
        future: Future[Result] = Future()
        self._calls.put((future, call))
        return future

    def use_idle_time(self, call: Callable[[], float | None]) -> None:
        """Run `call` in the thread when no other call has arrived for `IDLE_S`.

        It returns the seconds after which it is to run again if no other call arrives, or None.
        """
        self.submit(lambda: setattr(self, "_use_idle_time", call))

    def close(self, timeout_s: float) -> bool:
        """Cancel the calls that have not begun; return whether the thread ended in time."""
        try:
            while (entry := self._calls.get_nowait()) is not None:
                entry[0].cancel()
        except Empty:
            pass
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Any: as above.
    def _next_entry(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        wait_s: float | None = IDLE_S
        while True:
            try:
                return self._calls.get(timeout=wait_s)
            except Empty:
                wait_s = self._use_idle_time()

    def _run(self) -> None:
        while (entry := self._next_entry()) is not None:
            future, call = entry
            # The result would otherwise live until the next call.
            del entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # raised by `Future.result`
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del future, call
