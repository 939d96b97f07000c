"""How a rank connects to the controller: the listener, and the rank's end.

A rank sends its number and the epoch's secret before anything else. Others can connect too: any
user of the machine to the Unix socket, and of the network to a TCP port. So each connection may
send a few bytes in little time before its secret is known, and delays no other connection.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import time
from typing import TYPE_CHECKING

import msgspec

from pagedray.batch import ControllerMessage, WorkerMessage
from pagedray.channel import (
    LENGTH,
    ChannelClosedError,
    ChannelTimeoutError,
    ControllerChannel,
    StepChannel,
    WorkerChannel,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StepListener", "connect"]

_CREDENTIALS = struct.Struct("iII")
"""A peer's process, user and group."""
_TIMEVAL = struct.Struct("@ll")
_POLL_S = 0.1
_MAX_HELLO_BYTES = 256
_HELLO_TIMEOUT_S = 1.0
_MAX_WAITING = 64
"""Connections without a secret; the oldest one makes room for another."""


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    secret: bytes


class StepListener:
    """Accepts the ranks' connections in the controller's process."""

    def __init__(self, endpoint: str) -> None:
        """Listen on `unix:`, an abstract Unix socket, or `tcp:HOST:PORT`; port 0 selects one.

        Neither needs a folder, which could be read-only or full.
        """
        self._socket, self.endpoint = _listen(endpoint)

    def accept(
        self,
        num_ranks: int,
        secret: bytes,
        timeout_s: float,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> list[ControllerChannel]:
        """Wait until all ranks have connected with the secret; return their channels by rank.

        A connection with a wrong secret is closed. `check` is called repeatedly meanwhile and may
        raise to end the wait. Raises ChannelTimeoutError.
        """
        deadline_s = time.monotonic() + timeout_s
        channels: dict[int, ControllerChannel] = {}
        greetings = _Greetings(self._socket, secret)
        try:
            while len(channels) < num_ranks:
                check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0.0:
                    missing = sorted(set(range(num_ranks)) - set(channels))
                    raise ChannelTimeoutError(f"Ranks {missing} did not connect in time.")
                for rank, connection in greetings.receive(min(left_s, _POLL_S)):
                    if rank in channels or not 0 <= rank < num_ranks:
                        connection.close()
                    else:
                        channels[rank] = StepChannel(connection, WorkerMessage)
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        finally:
            greetings.close()
        return [channels[rank] for rank in range(num_ranks)]

    def close(self) -> None:
        """Stop listening; connected channels stay open."""
        self._socket.close()


class _Greetings:
    """The connections of a listener that have not sent the secret yet."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._secret = secret
        self._open: dict[int, _Greeting] = {}
        """Connections by descriptor, the oldest first."""
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)

    def receive(self, timeout_s: float) -> list[tuple[int, socket.socket]]:
        """Wait up to `timeout_s`; return ranks that have sent the secret, and their connections."""
        ready = [descriptor for descriptor, _ in self._poller.poll(timeout_s * 1e3)]
        found = []
        for descriptor in ready:
            greeting = self._open.get(descriptor)
            if greeting is None:
                self._accept()
                continue
            try:
                hello = greeting.receive()
            except (OSError, ChannelClosedError, msgspec.MsgspecError):
                self._remove(greeting).close()
                continue
            if hello is None:
                continue
            connection = self._remove(greeting)
            if hmac.compare_digest(hello.secret, self._secret):
                found.append((hello.rank, connection))
            else:
                connection.close()
        self._close_late()
        return found

    def close(self) -> None:
        """Close the connections that have not sent the secret."""
        for greeting in list(self._open.values()):
            self._remove(greeting).close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The peer is gone.
            return
        if connection.family == socket.AF_UNIX and not _is_own_user(connection):
            connection.close()
            return
        if len(self._open) >= _MAX_WAITING:
            self._remove(next(iter(self._open.values()))).close()
        connection.setblocking(False)
        self._open[connection.fileno()] = _Greeting(connection)
        self._poller.register(connection, select.POLLIN)

    def _close_late(self) -> None:
        now_s = time.monotonic()
        for greeting in list(self._open.values()):
            if now_s >= greeting.deadline_s:
                self._remove(greeting).close()

    def _remove(self, greeting: _Greeting) -> socket.socket:
        connection = greeting.connection
        self._poller.unregister(connection)
        del self._open[connection.fileno()]
        return connection


class _Greeting:
    """A connection that has not sent the secret yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline_s = time.monotonic() + _HELLO_TIMEOUT_S
        self._received = b""

    def receive(self) -> _Hello | None:
        """Return the hello once it is complete, and receive nothing beyond it.

        Raises OSError, ChannelClosedError or MsgspecError if none can follow.
        """
        chunk = self.connection.recv(self._num_missing())
        if not chunk:
            raise ChannelClosedError("The peer closed the connection.")
        self._received += chunk
        if self._num_missing():
            return None
        return msgspec.msgpack.decode(self._received[LENGTH.size :], type=_Hello)

    def _num_missing(self) -> int:
        if len(self._received) < LENGTH.size:
            return LENGTH.size - len(self._received)
        (length,) = LENGTH.unpack_from(self._received)
        if length > _MAX_HELLO_BYTES:
            raise ChannelClosedError(f"A hello of {length} bytes exceeds {_MAX_HELLO_BYTES}.")
        missing: int = LENGTH.size + length - len(self._received)
        return missing


def connect(endpoint: str, rank: int, secret: bytes, timeout_s: float) -> WorkerChannel:
    """Return the worker's end of the channel of `rank`."""
    kind, _, address = endpoint.partition(":")
    if kind == "unix":
        connection = _connect_unix(address, timeout_s)
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    hello: StepChannel[_Hello, object] = StepChannel(connection, object)
    hello.send(_Hello(rank, secret))
    return StepChannel(connection, ControllerMessage)


def _connect_unix(address: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # While the listener's queue is full, a connection with Python's timeout would fail at once. The
    # kernel's timeout makes it wait, behind connections that began to wait before.
    seconds, rest_s = divmod(timeout_s, 1.0)
    limit = _TIMEVAL.pack(int(seconds), int(rest_s * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        connection.connect(f"\0{address}")
    except OSError:
        connection.close()
        raise
    return connection


def _listen(endpoint: str) -> tuple[socket.socket, str]:
    kind, _, address = endpoint.partition(":")
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Linux selects a free name.
        listener.bind("")
        listener.listen()
        return listener, f"unix:{listener.getsockname()[1:].decode()}"
    if kind == "tcp":
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, int(port)), family=family)
        bound_host, bound_port = listener.getsockname()[:2]
        return listener, f"tcp:{bound_host}:{bound_port}"
    raise ValueError(f"The endpoint must be unix: or tcp:HOST:PORT, not {endpoint!r}.")


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether the peer of a Unix socket runs as this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())
