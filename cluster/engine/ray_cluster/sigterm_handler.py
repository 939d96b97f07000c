"""Keeps the SIGTERM handler of this process when a native library installs its own."""

from __future__ import annotations

import ctypes
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["kept_sigterm_handler"]

_SIGACTION_BYTES = 512
"""More than `struct sigaction` has on any platform."""


@contextmanager
def kept_sigterm_handler() -> Iterator[None]:
    """Undo what native code inside the block does to SIGTERM; Python's handlers are kept.

    Ray's core worker installs Abseil's failure signal handler. For SIGTERM, it prints a stack trace
    and starts an alarm that aborts the process after 3 s, and then calls the handler before it: no
    process could take longer than that to stop.
    """
    library = ctypes.CDLL(None)
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    library.sigaction(signal.SIGTERM, None, before)
    try:
        yield
    finally:
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and handler is not None:
            # Ray may have set a handler in Python too, which stays.
            signal.signal(signal.SIGTERM, handler)
        else:
            library.sigaction(signal.SIGTERM, before, None)
