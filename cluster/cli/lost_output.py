"""Standard output that nothing can be written to anymore."""

from __future__ import annotations

import errno
import os
import select

__all__ = ["discard_output", "has_lost_reader", "is_disk_full"]

_STDOUT = 1
_DISK_FULL = frozenset((errno.EDQUOT, errno.EFBIG, errno.ENOSPC))


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
