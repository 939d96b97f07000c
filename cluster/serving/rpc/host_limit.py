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
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.connection_limits import ConnectionLimits

__all__ = ["HostLimit"]

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 60.0
_DESCRIPTORS = Path("/proc/self/fd")
_Address = tuple[str, int]


class HostLimit:
    """Watches the connections of a port of this process."""

    def __init__(self, port: int, limits: ConnectionLimits) -> None:
        self._port = port
        self._limit = limits.per_host
        self._known: dict[_Address, None] = {}
        """Addresses of the connections that were allowed, oldest first."""
        self._next_log_s = 0.0

    async def watch(self) -> None:
        """Close connections beyond the limit until it is cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if len(list(_DESCRIPTORS.iterdir())) > self._limit:
                await asyncio.to_thread(self.close_excess)

    def close_excess(self) -> None:
        """Close the newest connections of each host that has too many."""
        found = dict(self._connections())
        num_open: Counter[str] = Counter()
        allowed: dict[_Address, None] = {}
        for address in (*(known for known in self._known if known in found), *found):
            if address in allowed:
                continue
            num_open[address[0]] += 1
            if num_open[address[0]] <= self._limit:
                allowed[address] = None
        for address, descriptor in found.items():
            if address not in allowed:
                self._shut(address, descriptor)
        self._known = allowed
        self._log({host for host, number in num_open.items() if number > self._limit})

    def _connections(self) -> Iterator[tuple[_Address, int]]:
        """Yield the client's address and the descriptor of each connection of the port."""
        for path in _DESCRIPTORS.iterdir():
            descriptor = int(path.name)
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    address = self._address(descriptor)
                    if address is not None:
                        yield address, descriptor

    def _address(self, descriptor: int) -> _Address | None:
        """Return the client's address if a socket is a connection of the port."""
        connection = socket.socket(fileno=descriptor)
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if connection.getsockname()[1] != self._port:
                return None
            host, port = connection.getpeername()[:2]
            return host, port
        finally:
            # gRPC owns it.
            connection.detach()

    def _shut(self, address: _Address, descriptor: int) -> None:
        """End a connection, which gRPC then closes."""
        # gRPC may have closed it meanwhile, but a duplicate stays what it is.
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if self._address(connection.fileno()) == address:
                connection.shutdown(socket.SHUT_RDWR)

    def _log(self, hosts: set[str]) -> None:
        now_s = time.monotonic()
        if hosts and now_s >= self._next_log_s:
            self._next_log_s = now_s + _LOG_INTERVAL_S
            logger.warning(
                "gRPC connections beyond %d of a host are closed: %s. Raise the limit of open "
                "files (ulimit -n) if these are clients of yours.",
                self._limit,
                ", ".join(sorted(hosts)[:5]),
            )
