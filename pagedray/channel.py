"""The step channel: typed messages between the controller and its ranks.

A frame is a four-byte length and a msgpack body, over an AF_UNIX stream on one node
and TCP between nodes; received data is never unpickled. A rank first sends its
number and the epoch's secret. End-of-file means that the peer has died.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from pagedray.batch import ControllerMessage, WorkerMessage
from pagedray.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ChannelClosedError",
    "ChannelTimeoutError",
    "ControllerChannel",
    "StepChannel",
    "StepListener",
    "WorkerChannel",
    "connect",
]

MAX_FRAME_BYTES = 256 * 2**20
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("iII")
"""A peer's process, user and group."""
_CHUNK_BYTES = 1 << 16
_PEER_TIMEOUT_S = 30
"""Time after which a TCP peer whose node does not answer counts as gone."""
_ACCEPT_POLL_S = 0.1

Outgoing = TypeVar("Outgoing")
Incoming = TypeVar("Incoming")


class ChannelClosedError(WorkerError):
    """The peer has closed the channel or died."""


class ChannelTimeoutError(WorkerError):
    """No message arrived in time."""


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    secret: bytes


class StepChannel(Generic[Outgoing, Incoming]):
    """One end of a connected channel. Not thread-safe."""

    def __init__(self, connection: socket.socket, incoming: object) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            _set_tcp_options(connection)
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._received = bytearray()
        self._outgoing = bytearray()
        """What was posted and the socket has not taken yet."""
        # `select.select` is limited to descriptors below 1024.
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def fileno(self) -> int:
        """Return the socket's descriptor, for `poll`."""
        return self._socket.fileno()

    def post(self, message: Outgoing) -> None:
        """Send what the socket takes of a message and keep the rest for `flush`; never waits.

        Raises ChannelClosedError if the peer is gone.
        """
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"A message of {len(body)} bytes exceeds {MAX_FRAME_BYTES}.")
        frame = _LENGTH.pack(len(body)) + body
        if not self._outgoing:
            num_sent = self._write(frame)
            if num_sent == len(frame):
                return
            frame = frame[num_sent:]
        self._outgoing += frame

    def flush(self) -> bool:
        """Send what the socket takes; return whether everything is sent. Never waits.

        Raises ChannelClosedError if the peer is gone.
        """
        while self._outgoing:
            with memoryview(self._outgoing) as waiting:
                num_sent = self._write(waiting[:_CHUNK_BYTES])
            if not num_sent:
                return False
            del self._outgoing[:num_sent]
        return True

    def send(self, message: Outgoing) -> None:
        """Send one message, however long the peer takes to receive it.

        Raises ChannelClosedError if the peer is gone.
        """
        self.post(message)
        while not self.flush():
            self._writable.poll()

    def receive(self, timeout_s: float | None = None) -> Incoming:
        """Return the next message.

        Raises ChannelTimeoutError if none is complete in time, and ChannelClosedError if the
        peer is gone or sends an invalid message.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        # After a timeout, a partial frame stays in the buffer for the next call.
        while (size := self._frame_size()) is None:
            if not self._fill():
                self._wait(deadline_s)
        return self._take(size)

    def received(self) -> list[Incoming]:
        """Return the messages that have arrived; never waits for the rest of one.

        Raises ChannelClosedError if the peer is gone or sends an invalid message.
        """
        self._fill()
        messages = []
        while (size := self._frame_size()) is not None:
            messages.append(self._take(size))
        return messages

    def has_message(self) -> bool:
        """Return whether `receive` can read something, an end-of-file included."""
        return self._frame_size() is not None or bool(self._readable.poll(0))

    def close(self) -> None:
        """Close this end; the peer reads end-of-file."""
        self._socket.close()

    def _frame_size(self) -> int | None:
        """Return the size of the first frame if it is complete."""
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise ChannelClosedError(f"A frame of {length} bytes exceeds {MAX_FRAME_BYTES}.")
        size: int = _LENGTH.size + length
        return size if len(self._received) >= size else None

    def _take(self, size: int) -> Incoming:
        body = bytes(self._received[_LENGTH.size : size])
        del self._received[:size]
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ChannelClosedError(f"Invalid message: {error}.") from error

    def _fill(self) -> bool:
        """Receive what has arrived; return whether anything has."""
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosedError(f"The step channel is closed: {error}.") from error
        if not chunk:
            raise ChannelClosedError("The peer closed the step channel.")
        self._received += chunk
        return True

    def _wait(self, deadline_s: float | None) -> None:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0.0:
            raise ChannelTimeoutError("No message arrived in time.")
        self._readable.poll(None if left_s is None else left_s * 1e3)

    def _write(self, frame: bytes | memoryview) -> int:
        """Return how many bytes the socket took."""
        try:
            return self._socket.send(frame)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosedError(f"The step channel is closed: {error}.") from error


ControllerChannel = StepChannel[ControllerMessage, WorkerMessage]
WorkerChannel = StepChannel[WorkerMessage, ControllerMessage]


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
        try:
            while len(channels) < num_ranks:
                check()
                self._accept_one(channels, num_ranks, secret, deadline_s)
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        return [channels[rank] for rank in range(num_ranks)]

    def close(self) -> None:
        """Stop listening; connected channels stay open."""
        self._socket.close()

    def _accept_one(
        self,
        channels: dict[int, ControllerChannel],
        num_ranks: int,
        secret: bytes,
        deadline_s: float,
    ) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            missing = sorted(set(range(num_ranks)) - set(channels))
            raise ChannelTimeoutError(f"Ranks {missing} did not connect in time.")
        self._socket.settimeout(min(left_s, _ACCEPT_POLL_S))
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return
        rank = _greeted_rank(connection, secret)
        if rank is None or rank in channels or not 0 <= rank < num_ranks:
            connection.close()
        else:
            channels[rank] = StepChannel(connection, WorkerMessage)


def connect(endpoint: str, rank: int, secret: bytes, timeout_s: float) -> WorkerChannel:
    """Return the worker's end of the channel of `rank`."""
    kind, _, address = endpoint.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        connection.connect(f"\0{address}")
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    hello: StepChannel[_Hello, object] = StepChannel(connection, object)
    hello.send(_Hello(rank, secret))
    return StepChannel(connection, ControllerMessage)


def _set_tcp_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # TCP_USER_TIMEOUT would also end the connection to a rank that is too busy to receive a plan.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PEER_TIMEOUT_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PEER_TIMEOUT_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


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
        listener = socket.create_server((host, int(port)))
        bound_host, bound_port = listener.getsockname()[:2]
        return listener, f"tcp:{bound_host}:{bound_port}"
    raise ValueError(f"The endpoint must be unix: or tcp:HOST:PORT, not {endpoint!r}.")


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether the peer of a Unix socket runs as this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _greeted_rank(connection: socket.socket, secret: bytes) -> int | None:
    # Any user of the machine could connect and keep silent.
    if connection.family == socket.AF_UNIX and not _is_own_user(connection):
        return None
    # Nothing else can be in the buffer: a rank sends no more until it has a plan.
    channel: StepChannel[object, _Hello] = StepChannel(connection, _Hello)
    try:
        hello = channel.receive(timeout_s=5.0)
    except WorkerError:
        return None
    return hello.rank if hmac.compare_digest(hello.secret, secret) else None
