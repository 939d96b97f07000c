"""Runs calls in threads that do not delay the end of the process, however long they take."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["start_call"]

Result = TypeVar("Result")


# Any: the arguments of the function.
def start_call(function: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Run a function in a daemon thread; Python exits without waiting for it, unlike a pool."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="pagedray-hub", daemon=True).start()
    return future
