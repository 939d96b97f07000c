"""The thread of a rank inside the server's process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RankThread"]

Result = TypeVar("Result")


class RankThread:
    """Runs calls in order, in one thread.

    A process does not wait for it at its end, unlike for a `ThreadPoolExecutor`, so that a rank
    that hangs does not keep the server from exiting.
    """

    def __init__(self) -> None:
        # Any: calls of any result.
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pagedray-rank", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run a call after those submitted before."""
        future: Future[Result] = Future()
        self._calls.put((future, call))
        return future

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

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
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
