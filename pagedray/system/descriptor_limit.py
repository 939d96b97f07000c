"""The limit of open file descriptors of a process."""

from __future__ import annotations

import resource

__all__ = ["descriptor_limit", "raise_descriptor_limit"]

# Some programs go through all possible descriptors, so a larger limit is of no use.
_MAX_LIMIT = 2**20


def descriptor_limit() -> int:
    """Return how many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_LIMIT if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raise the limit of this process, and of those that it starts, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MAX_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
