"""Stops gRPC connections that gRPC itself cannot limit.

These are the ones that a host has too many of, and those that send much, or are many, without one
valid call: gRPC decodes any number of headers, pings and settings of a client without a key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.serving.connections.client_host import client_host
from cluster.serving.memory.memory_trimmer import trim_memory
from cluster.serving.rpc.open_sockets import (
    end_connection,
    num_received_bytes,
    open_sockets,
    peer_address,
    resume_connection,
    stall_connection,
)
from cluster.serving.rpc.proven_connections import peer_name
from cluster.serving.rpc.unproven_share import UnprovenShare
from cluster.serving.telemetry.line_limit import LineLimit
from cluster.serving.text.thread_pauses import ThreadPauses

if TYPE_CHECKING:
    from cluster.serving.connections.connection_limits import ConnectionLimits
    from cluster.serving.rpc.proven_connections import ProvenConnections

__all__ = ["ConnectionWatch"]

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.1
_MAX_SHARE = 0.02
"""The share of a core that may be spent on watching."""
_ALERT_INTERVAL_S = 0.05
"""The interval while a connection is suspected, since the next look decides about it, and for
`_ALERT_S` after a host had too many connections."""
_MAX_ALERT_SHARE = 0.2
"""The share of a core in that time."""
_ALERT_S = 5.0
"""A host that had too many connections may immediately open as many again."""
_UNPROVEN_BYTES = 2**16
_UNPROVEN_BYTES_PER_S = 2**12
"""Health checks need less, at several a second."""
_MAX_STALLED = 64
_MAX_STALLED_PER_HOST = 8
"""Further connections are ended instead, so that the memory for stalled connections is bounded."""
_STALL_S = 60.0
_TRIM_INTERVAL_S = 5.0
_MANY_ENDED = 64
"""Number of closed sockets between two looks after which memory is returned to the system."""


@dataclass(frozen=True, slots=True)
class _Connection:
    host: str
    peer: str
    """The address, as gRPC writes it."""
    seen_s: float


class ConnectionWatch:
    """Watches the connections of a port of this process."""

    def __init__(self, port: int, limits: ConnectionLimits, proven: ProvenConnections) -> None:
        self._port = port
        self._limit = limits.per_host
        self._proven = proven
        self._known: dict[int, _Connection | None] = {}
        """Open sockets by their inodes, oldest first; None for those that are not of the port."""
        self._suspects: set[int] = set()
        """Connections that had sent too much at the last look, by their inodes."""
        self._stalled: dict[int, float] = {}
        """The times at which stalled connections end, by their inodes."""
        self._alert_until_s = 0.0
        self._excess_lines = LineLimit()
        self._unproven_lines = LineLimit()
        self._defect_lines = LineLimit()
        self._has_garbage = False
        self._next_trim_s = 0.0

    async def watch(self) -> None:
        """Look at all connections several times a second until it is cancelled."""
        interval_s = _INTERVAL_S
        while True:
            await asyncio.sleep(interval_s)
            spent_s = 0.0
            try:
                spent_s = await asyncio.to_thread(self._timed_look)
            except OSError:
                # Listing descriptors takes one; the next turn may find one.
                pass
            except Exception as error:
                # Without the watch, connections would have no limits.
                if self._defect_lines.count_event():
                    logger.error("gRPC connections could not be checked.", exc_info=error)
            is_alert = bool(self._suspects) or time.monotonic() < self._alert_until_s
            wanted_s = _ALERT_INTERVAL_S if is_alert else _INTERVAL_S
            share = _MAX_ALERT_SHARE if is_alert else _MAX_SHARE
            interval_s = max(wanted_s, spent_s / share)

    def _timed_look(self) -> float:
        # Time of the CPU: on a busy machine a look takes longer, and must not come later for that.
        started_s = time.thread_time()
        self.close_excess()
        return time.thread_time() - started_s

    def close_excess(self) -> None:
        """Stall or close what exceeds a limit, of a host's connections the newest.

        It pauses in between, since a thousand connections take several milliseconds, for which
        streams would have to wait.
        """
        pauses = ThreadPauses(are_long=False)
        sockets = open_sockets(pauses)
        self._update_known(sockets, pauses)
        num_open: Counter[str] = Counter()
        share = UnprovenShare()
        suspects: set[int] = set()
        for inode, connection in self._known.items():
            pauses.pause_if_due(time.thread_time())
            if connection is None:
                continue
            num_open[connection.host] += 1
            if num_open[connection.host] > self._limit:
                end_connection(sockets[inode], inode)
                self._alert_until_s = time.monotonic() + _ALERT_S
                self._log_excess(connection.host)
            elif inode in self._stalled:
                self._reconsider(connection, sockets[inode], inode)
            elif self._is_too_much(connection, sockets[inode], share):
                # A message may arrive shortly before the handler of its call has started.
                if inode not in self._suspects:
                    suspects.add(inode)
                    continue
                self._stop(sockets[inode], inode, connection.host)
                self._log_unproven(connection.host)
        self._suspects = suspects
        self._trim()

    def _update_known(self, sockets: dict[int, int], pauses: ThreadPauses) -> None:
        known = {inode: found for inode, found in self._known.items() if inode in sockets}
        num_ended = len(self._known) - len(known)
        for inode, descriptor in sockets.items():
            if inode not in known:
                pauses.pause_if_due(time.thread_time())
                address = peer_address(descriptor, self._port)
                known[inode] = (
                    None
                    if address is None
                    else _Connection(client_host(address[0]), peer_name(*address), time.monotonic())
                )
        self._known = known
        stalled = {one: end_s for one, end_s in self._stalled.items() if one in known}
        # gRPC keeps what they have sent until they end.
        self._has_garbage |= len(stalled) < len(self._stalled) or num_ended >= _MANY_ENDED
        self._stalled = stalled
        self._proven.forget_closed({one.peer for one in known.values() if one is not None})

    def _is_too_much(self, connection: _Connection, descriptor: int, share: UnprovenShare) -> bool:
        if connection.peer in self._proven:
            return False
        num_bytes = num_received_bytes(descriptor)
        age_s = time.monotonic() - connection.seen_s
        allowed = _UNPROVEN_BYTES + age_s * _UNPROVEN_BYTES_PER_S
        return num_bytes > allowed or not share.admits(connection.host, num_bytes)

    def _stop(self, descriptor: int, inode: int, host: str) -> None:
        """Stall a connection, so that its client waits; end it if its host has several of these."""
        hosts = [one.host for inode in self._stalled if (one := self._known[inode]) is not None]
        may_stall = len(hosts) < _MAX_STALLED and hosts.count(host) < _MAX_STALLED_PER_HOST
        if may_stall and stall_connection(descriptor, inode):
            self._stalled[inode] = time.monotonic() + _STALL_S
        else:
            end_connection(descriptor, inode)
            self._has_garbage = True

    def _reconsider(self, connection: _Connection, descriptor: int, inode: int) -> None:
        """Resume a stalled connection if a valid call has begun meanwhile; end an old one."""
        if connection.peer in self._proven:
            # A busy server begins a call some time after it has received it.
            del self._stalled[inode]
            resume_connection(descriptor, inode)
        elif time.monotonic() > self._stalled[inode]:
            end_connection(descriptor, inode)

    def _trim(self) -> None:
        """Return the memory of ended connections, which the allocator keeps, to the system."""
        now_s = time.monotonic()
        if self._has_garbage and now_s >= self._next_trim_s:
            self._has_garbage = False
            self._next_trim_s = now_s + _TRIM_INTERVAL_S
            trim_memory()

    def _log_excess(self, host: str) -> None:
        if num_closed := self._excess_lines.count_event():
            logger.warning(
                "Closed %d gRPC connections of hosts with more than %d connections, the last one "
                "from %s. If these are your clients, raise the limit of open files (ulimit -n).",
                num_closed,
                self._limit,
                host,
            )

    def _log_unproven(self, host: str) -> None:
        if num_closed := self._unproven_lines.count_event():
            logger.warning(
                "Stopped %d gRPC connections without a valid call that sent too much or were too "
                "many, the last one from %s.",
                num_closed,
                host,
            )
