"""The rendezvous of a group: a socket that rank 0 listens on."""

from __future__ import annotations

import socket

__all__ = ["LOOPBACK", "Rendezvous"]

LOOPBACK = "127.0.0.1"


class Rendezvous:
    """A listening socket that is bound to one address of its node.

    A `TCPStore` that opens its own socket listens on every interface. Binding the port first also
    keeps other processes from taking it before the store exists.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Listen on a port of `host`, any free one if it is 0. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.port: int = self._listener.getsockname()[1]

    def detach(self) -> int:
        """Return the socket's file descriptor, which the caller must close."""
        return self._listener.detach()

    def close(self) -> None:
        """Close the socket, unless it was detached."""
        self._listener.close()
