"""Memory that a controller shares with its ranks on the same node.

A rank opens it through the controller's process. It has no name in any folder: other users cannot
open it, it takes no space of /dev/shm, and it is gone once neither the controller nor a rank uses
it, however they end.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import NamedTuple

__all__ = ["MemoryAddress", "NodeMemory", "open_memory"]

_MODE = 0o600


class MemoryAddress(NamedTuple):
    """Where a rank finds memory of its controller."""

    path: str
    """Path of the controller's descriptor."""
    label: str
    """Random, since on another node the path may be that of anything."""


class NodeMemory:
    """The controller's descriptor of the memory.

    The memory is empty until the controller or a rank sets its size.
    """

    def __init__(self, purpose: str) -> None:
        """`purpose` is part of the name that tools show for the memory of a process.

        Raises OSError if the system cannot create the memory.
        """
        label = f"pagedray-{purpose}-{secrets.token_hex(16)}"
        self.descriptor = os.memfd_create(label)
        """Closed by `close`, and -1 then."""
        os.fchmod(self.descriptor, _MODE)
        self.address = MemoryAddress(f"/proc/{os.getpid()}/fd/{self.descriptor}", label)

    def close(self) -> None:
        """Free the memory once no rank uses it. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def open_memory(address: MemoryAddress) -> int:
    """Return a descriptor of the memory.

    Raises OSError, also if the address is of another node.
    """
    # Opening another file at the path could block or have effects.
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
