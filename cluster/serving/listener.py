"""A port for a front, or one line that says why it is not to be had."""

from __future__ import annotations

import socket

from pagedray.errors import DeviceError

__all__ = ["listen"]

_BACKLOG = 2048
_MAX_PORT = 65535


def listen(front: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 lets the system choose. Raises DeviceError."""
    if not 0 <= port <= _MAX_PORT:
        raise DeviceError(f"{front} port {port} is not allowed; use 0 to {_MAX_PORT}.")
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[4][:2], family=address[0], backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or "it cannot be bound"
        raise DeviceError(f"{front} port {port} of {host} is not to be had: {reason}.") from error
    listener.setblocking(False)
    return listener
