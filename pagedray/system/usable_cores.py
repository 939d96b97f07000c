"""How many cores a process may use, which in a container can be fewer than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CGROUP", "num_usable_cores"]

CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds the limits of its control group."""


def num_usable_cores(cgroup: Path = CGROUP) -> int:
    """Return the cores on which this process may run, or fewer if its container has a limit.

    Threads beyond a limit make the kernel stop all of them for a part of the time.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):
        # There is no such group, or its limit is "max".
        return allowed
