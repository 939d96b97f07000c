"""Clients that read streams and only count tokens, so that the server is the bottleneck.

They implement only as much of HTTP as a well-behaved server needs.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from bench.frontends.token_counter import TokenCounter

__all__ = ["Counts", "EventClients", "GrpcClients", "StreamClients"]

_HOST = "127.0.0.1"
_ACCEPTED = b"HTTP/1.1 200 "
_RECEIVE_BYTES = 2**18
_POLL_S = 0.1
_WINDOW_BYTES = 2**31 - 1
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_FRAME = struct.Struct(">HBBBI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The data that arrived within a period."""

    num_tokens: int
    num_messages: int
    """Events, or gRPC messages."""
    num_bytes: int
    """On the wire, above TCP."""
    seconds: float
    cpu_s: float
    """CPU time of the client."""


class _Connection(ABC):
    """A connection with one or more streams."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((_HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @abstractmethod
    def count(self, data: bytes) -> tuple[int, int]:
        """Return how many tokens and messages end in the next bytes."""


class StreamClients:
    """Connections that one thread reads in turns."""

    def __init__(self, connections: list[_Connection], counter: TokenCounter) -> None:
        self._counter = counter
        self._poll = select.epoll()
        self._connections = {one.socket.fileno(): one for one in connections}
        for number, connection in self._connections.items():
            connection.socket.setblocking(False)
            self._poll.register(number, select.EPOLLIN)

    def read(self, seconds: float) -> Counts:
        """Count for a period. Raises ConnectionError if a stream ends."""
        num_tokens = num_messages = num_bytes = 0
        cpu_s, started_s = time.process_time(), time.monotonic()
        end_s = started_s + seconds
        while time.monotonic() < end_s:
            for number, _ in self._poll.poll(_POLL_S):
                connection = self._connections[number]
                data = connection.socket.recv(_RECEIVE_BYTES)
                if not data:
                    raise ConnectionError("The server ended a stream.")
                tokens, messages = connection.count(data)
                self._counter.add(tokens)
                num_tokens += tokens
                num_messages += messages
                num_bytes += len(data)
        return Counts(
            num_tokens=num_tokens,
            num_messages=num_messages,
            num_bytes=num_bytes,
            seconds=time.monotonic() - started_s,
            cpu_s=time.process_time() - cpu_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        self._poll.close()


class EventClients(StreamClients):
    """Clients of server-sent events, each on a connection of its own."""

    def __init__(
        self,
        port: int,
        counter: TokenCounter,
        *,
        num_streams: int,
        path: str,
        body: bytes,
        token_text: bytes,
    ) -> None:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {_HOST}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        connections = [
            _EventConnection(port, head.encode() + body, token_text) for _ in range(num_streams)
        ]
        super().__init__([*connections], counter)


class _EventConnection(_Connection):
    def __init__(self, port: int, request: bytes, token_text: bytes) -> None:
        super().__init__(port)
        self._token_text = token_text
        self._num_held = len(token_text) - 1
        self._end = b""
        self._is_accepted = False
        self.socket.sendall(request)

    def count(self, data: bytes) -> tuple[int, int]:
        """Return how many tokens and events end in the next bytes. Raises ConnectionError."""
        if not self._is_accepted:
            if not data.startswith(_ACCEPTED):
                raise ConnectionError(f"The server refused a stream: {data!r:.400}")
            self._is_accepted = True
        num_events = data.count(b"\n\n") + (self._end[-1:] == b"\n" == data[:1])
        seen = self._end + data
        # Long enough to hold the start of a token that ends in the next bytes.
        self._end = seen[-self._num_held :]
        return seen.count(self._token_text), num_events


class GrpcClients(StreamClients):
    """Clients of one streaming gRPC method, on a number of connections."""

    def __init__(
        self,
        port: int,
        counter: TokenCounter,
        *,
        num_streams: int,
        num_connections: int,
        path: str,
        message: bytes,
        token_text: bytes,
    ) -> None:
        assert num_streams % num_connections == 0
        connections = [
            _GrpcConnection(port, num_streams // num_connections, path, message, token_text)
            for _ in range(num_connections)
        ]
        super().__init__([*connections], counter)


class _GrpcConnection(_Connection):
    def __init__(
        self, port: int, num_streams: int, path: str, message: bytes, token_text: bytes
    ) -> None:
        super().__init__(port)
        self._token_text = token_text
        self._unread = b""
        # The part of a message that continues in the next frame of its stream.
        self._parts: dict[int, bytes] = {}
        headers = _header_block(
            {
                ":method": "POST",
                ":scheme": "http",
                ":path": path,
                ":authority": _HOST,
                "te": "trailers",
                "content-type": "application/grpc",
            }
        )
        body = struct.pack(">BI", 0, len(message)) + message
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW_BYTES)
        window = struct.pack(">I", _WINDOW_BYTES - 65_535)
        begin = _PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, window)
        calls = [
            _frame(_HEADERS, _END_HEADERS, number, headers)
            + _frame(_DATA, _END_STREAM, number, body)
            for number in range(1, 2 * num_streams, 2)
        ]
        self.socket.sendall(begin + b"".join(calls))

    def count(self, data: bytes) -> tuple[int, int]:
        """Return how many tokens and messages end in the next bytes. Raises ConnectionError."""
        data = self._unread + data
        num_tokens = num_messages = start = 0
        while len(data) - start >= 9:
            high, low, kind, flags, number = _FRAME.unpack_from(data, start)
            end = start + 9 + (high << 8 | low)
            if end > len(data):
                break
            if kind == _DATA:
                tokens, messages = self._count_messages(number, data[start + 9 : end])
                num_tokens += tokens
                num_messages += messages
            else:
                self._answer(kind, flags, data[start + 9 : end])
            start = end
        self._unread = data[start:]
        return num_tokens, num_messages

    def _count_messages(self, number: int, data: bytes) -> tuple[int, int]:
        data = self._parts.pop(number, b"") + data
        num_messages = start = 0
        while len(data) - start >= 5:
            end = start + 5 + int.from_bytes(data[start + 1 : start + 5])
            if end > len(data):
                break
            num_messages += 1
            start = end
        if start < len(data):
            self._parts[number] = data[start:]
            data = data[:start]
        return data.count(self._token_text), num_messages

    def _answer(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (_RESET, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
            raise ConnectionError("The server ended a stream.")
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self.socket.send(_frame(kind, _ACK, 0, payload if kind == _PING else b""))


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    high, low = divmod(len(payload), 256)
    return _FRAME.pack(high, low, kind, flags, number) + payload


def _header_block(headers: dict[str, str]) -> bytes:
    """Return headers in HPACK, all as short literals that are not indexed."""
    return b"".join(
        b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())
        for name, value in headers.items()
    )
