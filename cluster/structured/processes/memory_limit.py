"""The memory limit of a process of structured output, enforced by the kernel."""

import resource
from pathlib import Path

__all__ = ["is_out_of_memory", "lift_memory_limit", "limit_memory"]

_DATA = 5
"""The field of statm with the pages of data and stacks."""


def limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more memory than it has."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[_DATA])
    maximum = num_pages * resource.getpagesize() + num_bytes
    # RLIMIT_DATA instead of RLIMIT_AS: each thread reserves far more addresses than it uses.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lift_memory_limit() -> None:
    """Lift the limit, so that this process can report its result."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out."""
    # The second is how xgrammar reports it.
    return isinstance(error, MemoryError) or "std::bad_alloc" in str(error)
