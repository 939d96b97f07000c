"""The memory that a process of structured output may take, kept by the kernel."""

from __future__ import annotations

import resource
from pathlib import Path

__all__ = ["is_out_of_memory", "lift_memory_limit", "limit_memory"]

_DATA = 5
"""The field of statm that has the pages of data and of stacks."""


def limit_memory(num_bytes: int) -> None:
    """Let this process take so many bytes more than it has."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[_DATA])
    most = num_pages * resource.getpagesize() + num_bytes
    # Data, not addresses: each thread reserves many more addresses than it uses.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lift_memory_limit() -> None:
    """Let this process take memory again, to say what became of it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory."""
    # The second is how the library's own code tells it.
    return isinstance(error, MemoryError) or "std::bad_alloc" in str(error)
