"""Memory of a CPU pool that outlives the rank which uses it.

The controller makes it, and a rank on the same node opens it through the controller's process. It
has no name in any folder: other users cannot open it, it takes no space of /dev/shm, and it is gone
once neither the controller nor a rank uses it, however they end.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import NamedTuple

__all__ = ["MemoryAddress", "PoolMemory", "PoolReport", "open_memory"]

_MODE = 0o600


class MemoryAddress(NamedTuple):
    """Where a rank finds the memory of its CPU pool."""

    path: str
    """Of the controller's descriptor."""
    label: str
    """Random, since on another node the path may be that of anything."""


class PoolReport(NamedTuple):
    """What became of a rank's CPU pool when the rank was made ready for an epoch."""

    is_shared: bool = False
    """Whether it is in the memory of the controller."""
    is_kept: bool = False
    """Whether it has what it had in the epoch before."""
    damaged: tuple[int, ...] = ()
    """Of a kept one, the blocks that are not known to be as they were."""


class PoolMemory:
    """The controller's side; empty until a rank gives it a size."""

    def __init__(self) -> None:
        """Raises OSError if the system makes no such memory."""
        label = f"pagedray-cpu-pool-{secrets.token_hex(16)}"
        self._descriptor = os.memfd_create(label)
        os.fchmod(self._descriptor, _MODE)
        self.address = MemoryAddress(f"/proc/{os.getpid()}/fd/{self._descriptor}", label)

    def close(self) -> None:
        """Free the memory once no rank uses it. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def open_memory(address: MemoryAddress) -> int:
    """Return a descriptor of the memory.

    Raises OSError, also if the address is of another node.
    """
    # Opening what else may have the path could block or have effects.
    _check_label(address.path, address)
    descriptor = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_label(f"/proc/self/fd/{descriptor}", address)
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o777 != _MODE:
            raise PermissionError("the memory is open to other users")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_label(path: str, address: MemoryAddress) -> None:
    try:
        target = str(Path(path).readlink())
    except FileNotFoundError:
        target = ""
    if target != f"/memfd:{address.label} (deleted)":
        raise FileNotFoundError("the memory of its controller is not on this node")
