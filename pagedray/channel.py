"""The step channel: typed messages between the controller and its ranks.

A frame is a four-byte length and a msgpack body, over an AF_UNIX stream on one node
and TCP between nodes; received data is never unpickled. End-of-file means that the peer
has died. `step_listener` connects the two ends.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Generic, TypeVar

import msgspec

from pagedray.batch import ControllerMessage, WorkerMessage
from pagedray.errors import WorkerError

__all__ = [
    "LENGTH",
    "ChannelClosedError",
    "ChannelTimeoutError",
    "ControllerChannel",
    "StepChannel",
    "WorkerChannel",
]

MAX_FRAME_BYTES = 256 * 2**20
LENGTH = struct.Struct("!I")
"""The length of a frame, without itself."""
_CHUNK_BYTES = 1 << 16
_PEER_TIMEOUT_S = 30
"""Time after which a TCP peer counts as gone if its node does not answer."""

Outgoing = TypeVar("Outgoing")
Incoming = TypeVar("Incoming")


class ChannelClosedError(WorkerError):
    """The peer has closed the channel or died."""


class ChannelTimeoutError(WorkerError):
    """No message arrived in time."""


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
        """Posted bytes that the socket has not accepted yet."""
        # `select.select` is limited to descriptors below 1024.
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def fileno(self) -> int:
        """Return the socket's descriptor, for `poll`."""
        return self._socket.fileno()

    def post(self, message: Outgoing) -> None:
        """Send as much of a message as the socket takes and keep the rest for `flush`; never waits.

        Raises ChannelClosedError if the peer is gone.
        """
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"A message of {len(body)} bytes exceeds {MAX_FRAME_BYTES}.")
        frame = LENGTH.pack(len(body)) + body
        if not self._outgoing:
            num_sent = self._write(frame)
            if num_sent == len(frame):
                return
            frame = frame[num_sent:]
        self._outgoing += frame

    def flush(self) -> bool:
        """Send as much as the socket accepts; return whether everything is sent. Never waits.

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
        """Return the messages that have arrived; never waits for the rest of a message.

        Raises ChannelClosedError if the peer is gone or sends an invalid message.
        """
        self._fill()
        messages = []
        while (size := self._frame_size()) is not None:
            messages.append(self._take(size))
        return messages

    def has_message(self, timeout_s: float = 0.0) -> bool:
        """Return whether `receive` can read something in time, an end-of-file included."""
        return self._frame_size() is not None or bool(self._readable.poll(timeout_s * 1e3))

    def close(self) -> None:
        """Close this end; the peer reads end-of-file."""
        self._socket.close()

    def _frame_size(self) -> int | None:
        """Return the size of the first frame if it is complete."""
        if len(self._received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise ChannelClosedError(f"A frame of {length} bytes exceeds {MAX_FRAME_BYTES}.")
        size: int = LENGTH.size + length
        return size if len(self._received) >= size else None

    def _take(self, size: int) -> Incoming:
        body = bytes(self._received[LENGTH.size : size])
        del self._received[:size]
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ChannelClosedError(f"Invalid message: {error}.") from error

    def _fill(self) -> bool:
        """Receive the bytes that have arrived; return whether there were any."""
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
        """Return how many bytes the socket accepted."""
        try:
            return self._socket.send(frame)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosedError(f"The step channel is closed: {error}.") from error


ControllerChannel = StepChannel[ControllerMessage, WorkerMessage]
WorkerChannel = StepChannel[WorkerMessage, ControllerMessage]


def _set_tcp_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # TCP_USER_TIMEOUT would also end the connection to a rank that is too busy to receive a plan.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PEER_TIMEOUT_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PEER_TIMEOUT_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
