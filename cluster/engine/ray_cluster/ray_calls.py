"""Runs calls to Ray, which may block forever if it fails, in threads that can be abandoned."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from pagedray.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["result_unless", "start_call"]

Result = TypeVar("Result")


def start_call(call: Callable[[], Result]) -> Future[Result]:
    """Run a call in a thread of its own, for which the interpreter does not wait at its end.

    Raises WorkerError if the system has no more threads.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="pagedray-ray-call", daemon=True).start()
    except RuntimeError as error:
        raise WorkerError(f"Ray could not be called: {error}.") from error
    return future


def result_unless(
    check: Callable[[], None], call: Callable[[], Result], *, period_s: float
) -> Result:
    """Return the result of `call`, or raise its error.

    While it runs, `check` is called every `period_s`; if that raises, the call is abandoned.
    """
    future = start_call(call)
    # Not `future.result`, which may time out just before the call returns.
    while not wait((future,), period_s).done:
        check()
    return future.result()
