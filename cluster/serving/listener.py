"""A port for a frontend, or one line that says why it is not to be had."""

from __future__ import annotations

import socket

from pagedray.errors import DeviceError

__all__ = ["listen"]

_BACKLOG = 2048
_MAX_PORT = 65535


def listen(frontend: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 lets the system choose. Raises DeviceError."""
    if not 0 <= port <= _MAX_PORT:
        raise DeviceError(f"{frontend} port {port} is not allowed; use 0 to {_MAX_PORT}.")
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[4][:2], family=address[0], backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or "it cannot be bound"
        raise DeviceError(f"Cannot bind {frontend} port {port} of {host}: {reason}.") from error
    # Connections inherit it. Without it, what follows a small write waits until the client has
    # acknowledged that, which clients do up to 40 ms later; asyncio sets it only on sockets that
    # were made with the protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener
