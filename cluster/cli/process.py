"""The process of a command: interrupts while it starts, and its standard streams."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = [
    "INTERRUPT_EXIT",
    "discard_output",
    "exiting_at_interrupt",
    "has_lost_reader",
    "is_disk_full",
    "open_standard_streams",
]

INTERRUPT_EXIT = 130

_STDOUT = 1
_DISK_FULL = frozenset((errno.EDQUOT, errno.EFBIG, errno.ENOSPC))


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


def open_standard_streams() -> None:
    """Open the null device in place of standard streams that are closed.

    Otherwise a socket would have the descriptor to which libraries and child processes write their
    messages.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest descriptor that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # until the process ends


def discard_output() -> None:
    """Discard all later output, and output that could not be written.

    Otherwise the interpreter would try to write it again at its exit, and report the failure.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, _STDOUT)
    os.close(null)


def has_lost_reader() -> bool:
    """Return whether nothing reads the output anymore, as behind `| head`."""
    output = select.poll()
    output.register(_STDOUT, 0)
    return any(events & select.POLLERR for _, events in output.poll(0))


def is_disk_full(error: OSError) -> bool:
    """Return whether something was not written because of the limits of a disk."""
    return error.errno in _DISK_FULL
