"""How much memory this machine has, or the container in which the process runs."""

from __future__ import annotations

import os
from pathlib import Path

from pagedray.system.usable_cores import CGROUP

__all__ = ["available_host_bytes", "host_memory_bytes"]

_MEMINFO = Path("/proc/meminfo")


def host_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes of host memory that this machine or container has."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):
        # There is no such group, or its limit is "max".
        return total


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes of host memory that programs may still take here without swapping.

    What the kernel can drop, such as the cached pages of checkpoints, counts as available.
    """
    available = 1024 * _entry(meminfo, "MemAvailable:")
    try:
        used = int((cgroup / "memory.current").read_text())
        left = host_memory_bytes(cgroup) - used + _entry(cgroup / "memory.stat", "inactive_file")
    except (OSError, ValueError):
        return available
    return max(min(available, left), 0)


def _entry(path: Path, name: str) -> int:
    """Return the number after a name in a file of the kernel."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{path} has no {name}")
