"""The standard streams of a process that was started without them, as by some supervisors."""

import os
import sys

__all__ = ["open_standard_streams"]


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
