"""The rendezvous of a group: where its ranks find the addresses of each other.

On one node it is a file in memory, which other users cannot open. Between nodes it is a socket that
rank 0 listens on.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["LOOPBACK", "FileRendezvous", "GroupAddress", "Rendezvous", "SocketRendezvous"]

LOOPBACK = "127.0.0.1"

GroupAddress = tuple[str, int] | Path
"""Address of a rendezvous: the host and port of a socket, or the path of a file."""

_FILE_NAME = "pagedray-rendezvous"


class FileRendezvous:
    """A file in memory; its path leads through this process, to which others have no access."""

    def __init__(self) -> None:
        self._file = os.memfd_create(_FILE_NAME)

    @property
    def address(self) -> Path:
        """The path for the other ranks."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def close(self) -> None:
        """Close the file, once all ranks have opened it."""
        os.close(self._file)

    @staticmethod
    def open(address: Path) -> int:
        """Return another descriptor of the file at an address. Raises OSError."""
        file = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        # The id of an ended process may have been given to another process.
        if _FILE_NAME not in str(Path(f"/proc/self/fd/{file}").readlink()):
            os.close(file)
            raise FileNotFoundError(f"{address} is not a rendezvous")
        return file


class SocketRendezvous:
    """A listening socket that is bound to one address of its node.

    A `TCPStore` that opens its own socket listens on every interface. Binding the port first also
    keeps other processes from taking it before the store exists.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Listen on a port of `host`, any free port if `port` is 0. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._host = host
        self.port: int = self._listener.getsockname()[1]

    @property
    def address(self) -> tuple[str, int]:
        """The host and port for the other ranks."""
        return self._host, self.port

    def detach(self) -> int:
        """Return the socket's file descriptor, which the caller must close."""
        return self._listener.detach()

    def close(self) -> None:
        """Close the socket, unless it was detached."""
        self._listener.close()


Rendezvous = FileRendezvous | SocketRendezvous
