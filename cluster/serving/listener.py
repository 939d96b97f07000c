"""Listening sockets for the frontends, and the number of their connections."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedray.errors import DeviceError
from pagedray.machine import descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BACKLOG",
    "MAX_TOTAL",
    "ConnectionLimits",
    "check_ports",
    "connection_limits",
    "free_port",
    "listen",
    "url_host",
]

BACKLOG = 2048
"""Connections that wait to be accepted."""
_MAX_PORT = 65535

MAX_TOTAL = 10_000
_RESERVE = 128
"""Descriptors for files, the connections to ranks, and the start of others in their place."""
_NUM_FRONTENDS = 2


class _PortInUseError(DeviceError):
    """Another program, or another frontend, listens on a port."""

    def __init__(self, host: str, ports: Mapping[str, int]) -> None:
        named = " and ".join(f"{frontend} port {port}" for frontend, port in ports.items())
        flags = " and ".join(f"--{frontend.lower()}-port" for frontend in ports)
        what = (
            "are already in use; choose others"
            if len(ports) > 1
            else ("is already in use; choose another one")
        )
        super().__init__(f"{named} of {host} {what} with {flags}.")


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raise DeviceError if a frontend cannot listen on its port; it names all ports in use."""
    used = {}
    with ExitStack() as listeners:
        for frontend, port in ports.items():
            try:
                listeners.enter_context(listen(frontend, host, port))
            except _PortInUseError:
                used[frontend] = port
    if used:
        raise _PortInUseError(host, used)


def free_port(frontend: str, host: str, first: int, *, other: int) -> int:
    """Return the first free port from `first` on that is not `other`. Raises DeviceError."""
    for port in range(first, _MAX_PORT + 1):
        try:
            listen(frontend, host, port).close()
        except _PortInUseError:
            continue
        if port != other:
            return port
    raise _PortInUseError(host, {frontend: first})


def listen(frontend: str, host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 lets the system choose. Raises DeviceError."""
    if not 0 <= port <= _MAX_PORT:
        raise DeviceError(f"{frontend} port must be from 0 to {_MAX_PORT}, not {port}.")
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[4][:2], family=address[0], backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _PortInUseError(host, {frontend: port}) from error
        # The rest repeats the address.
        reason = (error.strerror or "unknown error").partition(" (while attempting")[0]
        raise DeviceError(f"Cannot bind {frontend} to {host}:{port}: {reason}.") from error
    # Connections inherit TCP_NODELAY. Without it, Nagle's algorithm holds a small write back until
    # the client acknowledges the last write, up to 40 ms later; asyncio sets it only on sockets
    # made with the protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


def url_host(host: str) -> str:
    """Return a host name or address as URLs write it."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The open connections of one frontend."""

    total: int = MAX_TOTAL
    idle_s: float = 300.0
    """A gRPC connection without calls is closed after this time; its client connects again."""
    age_s: float = 3600.0
    """A gRPC connection takes no more calls after this time, give or take a tenth.

    Open calls end as if it did.
    """


def connection_limits() -> ConnectionLimits:
    """Return the limits of each frontend under the descriptor limit of this process."""
    available = max(descriptor_limit() - _RESERVE, descriptor_limit() // 4)
    total = max(2, min(MAX_TOTAL, available // _NUM_FRONTENDS))
    return ConnectionLimits(total)
