"""Closes what a host has too many of among gRPC's connections, which gRPC itself cannot limit."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.serving.connection_limits import ConnectionLimits

__all__ = ["HostLimit"]

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 60.0
_DESCRIPTORS = "/proc/self/fd"


class HostLimit:
    """Watches the connections of a port of this process."""

    def __init__(self, port: int, limits: ConnectionLimits) -> None:
        self._port = port
        self._limit = limits.per_host
        self._hosts: dict[int, str | None] = {}
        """The client's host of each open socket by its inode, oldest first; None if the socket is
        no connection of the port."""
        self._next_log_s = 0.0

    async def watch(self) -> None:
        """Close connections beyond the limit until it is cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            # Listing descriptors takes one; without any, the next turn may find one.
            with suppress(OSError):
                await asyncio.to_thread(self.close_excess)

    def close_excess(self) -> None:
        """Close the newest connections of each host that has too many."""
        with os.scandir(_DESCRIPTORS) as entries:
            descriptors = [int(entry.name) for entry in entries]
        if len(descriptors) <= self._limit:
            return
        found = _sockets_among(descriptors)
        self._hosts = {inode: host for inode, host in self._hosts.items() if inode in found}
        for inode, descriptor in found.items():
            if inode not in self._hosts:
                self._hosts[inode] = self._host_of(descriptor)
        num_open: Counter[str] = Counter()
        for inode, host in self._hosts.items():
            if host is not None:
                num_open[host] += 1
                if num_open[host] > self._limit:
                    _shut(found[inode], inode)
        self._log([host for host, number in num_open.items() if number > self._limit])

    def _host_of(self, descriptor: int) -> str | None:
        """Return the client's host if a socket is a connection of the port."""
        with suppress(OSError):
            connection = socket.socket(fileno=descriptor)
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    # It may be one that listens, or that is closed: it has no peer.
                    host = str(connection.getpeername()[0])
                    return host if connection.getsockname()[1] == self._port else None
            finally:
                # Somebody else owns it.
                connection.detach()
        return None

    def _log(self, hosts: list[str]) -> None:
        now_s = time.monotonic()
        if hosts and now_s >= self._next_log_s:
            self._next_log_s = now_s + _LOG_INTERVAL_S
            logger.warning(
                "gRPC connections beyond %d of a host are closed: %s. Raise the limit of open "
                "files (ulimit -n) if these are clients of yours.",
                self._limit,
                ", ".join(sorted(hosts)[:5]),
            )


def _sockets_among(descriptors: list[int]) -> dict[int, int]:
    """Return the descriptors of sockets by their inodes."""
    found: dict[int, int] = {}
    for descriptor in descriptors:
        with suppress(OSError):
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = descriptor
    return found


def _shut(descriptor: int, inode: int) -> None:
    """End a connection, which gRPC then closes."""
    # gRPC may have closed it meanwhile, but a duplicate stays what it is.
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.shutdown(socket.SHUT_RDWR)
