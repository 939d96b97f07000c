"""A process that can start no more threads, as at the limit of a container."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NO_ADDRESS_SPACE = 2**47
"""No process has room for a stack of this size."""


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let every start of a thread of Python fail."""
    size = threading.stack_size(_NO_ADDRESS_SPACE)
    try:
        yield
    finally:
        threading.stack_size(size)
