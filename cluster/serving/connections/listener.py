"""Listening sockets for the frontends."""

from __future__ import annotations

import errno
import socket

from pagedray.errors import DeviceError

__all__ = ["listen", "url_host"]

_BACKLOG = 2048
_MAX_PORT = 65535


def listen(frontend: str, host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 lets the system choose. Raises DeviceError."""
    if not 0 <= port <= _MAX_PORT:
        raise DeviceError(f"{frontend} port must be from 0 to {_MAX_PORT}, not {port}.")
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[4][:2], family=address[0], backlog=_BACKLOG)
    except OSError as error:
        raise DeviceError(_failure(frontend, host, port, error)) from error
    # Connections inherit TCP_NODELAY. Without it, Nagle's algorithm holds a small write back until
    # the client acknowledges the last one, up to 40 ms later; asyncio sets it only on sockets made
    # with the protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


def _failure(frontend: str, host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        flag = f"--{frontend.lower()}-port"
        return (
            f"{frontend} port {port} of {host} is already in use; choose another one with {flag}."
        )
    # What follows repeats the address.
    reason = (error.strerror or "unknown error").partition(" (while attempting")[0]
    return f"Cannot bind {frontend} to {host}:{port}: {reason}."


def url_host(host: str) -> str:
    """Return a host name or address as URLs write it."""
    return f"[{host}]" if ":" in host else host
