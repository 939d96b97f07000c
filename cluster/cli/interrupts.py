"""Ctrl-C while a command starts."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["INTERRUPT_EXIT", "exiting_at_interrupt"]

INTERRUPT_EXIT = 130


@contextmanager
def exiting_at_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without clean-up, as is right for imports.

    Libraries that are being imported replace a KeyboardInterrupt by other exceptions.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # The parent process may have disabled it.
        yield
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPT_EXIT)
