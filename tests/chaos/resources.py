"""Measures the resources that a server's processes hold."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.chaos.targets.target import Target

__all__ = ["SharedMemoryWatch", "num_descriptors", "rss_mib", "shared_memory_of"]

_SHARED_MEMORY = "/dev/shm/"


class SharedMemoryWatch:
    """Remembers the shared memory files that the processes of a server have used."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def look(self, target: Target) -> None:
        """Note the files in use."""
        self._seen |= shared_memory_of(target.family())

    def left(self) -> tuple[str, ...]:
        """Return those that still exist."""
        return tuple(sorted(name for name in self._seen if Path(name).exists()))


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the names of the shared memory files that processes have mapped or open."""
    found: set[str] = set()
    for process in processes:
        # A process that ends meanwhile has none.
        with contextlib.suppress(OSError):
            found |= _mapped(process.pid) | _opened(process.pid)
    return found


def num_descriptors(processes: Iterable[psutil.Process]) -> int:
    """Return the number of open descriptors of all processes."""
    number = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            number += process.num_fds()
    return number


def rss_mib(processes: Iterable[psutil.Process]) -> float:
    """Return the memory of all processes."""
    number = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            number += process.memory_info().rss
    return round(number / 2**20, 1)


def _mapped(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    # Address, permissions, offset, device, inode, path.
    paths = (line.split(maxsplit=5)[5] for line in lines if _SHARED_MEMORY in line)
    return {path for path in paths if path.startswith(_SHARED_MEMORY) and "(deleted)" not in path}


def _opened(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            path = os.readlink(link)  # noqa: PTH115  # Path.readlink gives a path, this a text
            if path.startswith(_SHARED_MEMORY) and "(deleted)" not in path:
                found.add(path)
    return found
