"""Thread pools that need no new thread once they were made."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["start_threads"]


def start_threads(
    num_threads: int, *, name: str, initializer: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """Return a pool whose threads have been started, so that `submit` needs no new thread.

    An executor keeps the work whose thread could not be started, and may run it much later. Raises
    RuntimeError if the system has no more threads.
    """
    threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=initializer)
    # A thread that waits is not idle, so that the next work gets another one.
    are_started = threading.Barrier(num_threads)
    try:
        for _ in range(num_threads):
            threads.submit(are_started.wait)
    except RuntimeError:
        are_started.abort()
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    return threads
