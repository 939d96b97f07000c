"""HTTP/2 connections for arbitrary frames, which a client library would not send."""

from __future__ import annotations

import select
import socket
import struct
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ACK",
    "CONTINUATION",
    "DATA",
    "END_HEADERS",
    "END_STREAM",
    "HEADERS",
    "PING",
    "PREFACE",
    "RST_STREAM",
    "SETTINGS",
    "Http2Connection",
    "call_headers",
    "frame",
    "indexed_field",
    "literal_field",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
ACK, END_STREAM, END_HEADERS = 1, 1, 4
_STATIC_ENTRIES = 61
_RECEIVE_BYTES = 2**18


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal_field(name: bytes, value: bytes, *, is_indexed: bool = False) -> bytes:
    """Return a header field with its name, which is stored in the dynamic table if indexed."""
    first = 0x40 if is_indexed else 0
    return bytes((first,)) + _string(name) + _string(value)


def indexed_field(place: int) -> bytes:
    """Return a reference to the dynamic table's entry; 0 is the latest."""
    return _number(_STATIC_ENTRIES + 1 + place, 7, 0x80)


def call_headers(path: str, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header block of a gRPC call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "attacker",
        "te": "trailers",
        "content-type": "application/grpc",
        **(metadata or {}),
    }
    return b"".join(literal_field(name.encode(), text.encode()) for name, text in fields.items())


class Http2Connection:
    """A connection that has sent its preface and settings. A context manager."""

    def __init__(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        source: str = "127.0.0.1",
        acknowledges: bool = True,
    ) -> None:
        """`source` is the address to connect from; all of 127.0.0.0/8 is the loopback.

        A server's settings apply once they are acknowledged.
        """
        self.is_open = True
        self.num_received = 0
        """Bytes from the server, which are not kept."""
        self._socket = socket.create_connection((host, port), 10.0, (source, 0))
        self._socket.setblocking(False)
        ack = frame(SETTINGS, ACK, 0) if acknowledges else b""
        self.send_frames(PREFACE + frame(SETTINGS, 0, 0) + ack)

    def send_frames(self, data: bytes, timeout_s: float = 10.0) -> bool:
        """Send bytes, reading meanwhile; return whether the server took them in time."""
        view = memoryview(data)
        while view and self.is_open:
            readable, writable, _ = select.select([self._socket], [self._socket], [], timeout_s)
            if not readable and not writable:
                return False
            if readable:
                self._read()
            if writable and self.is_open:
                view = view[self._send(view) :]
        return not view

    def send_unread(self, data: bytes) -> int:
        """Send what the server takes at once, without reading; return the number of bytes."""
        return self._send(memoryview(data))

    def read_for(self, seconds: float) -> None:
        """Read what comes next within a time."""
        if self.is_open and select.select([self._socket], [], [], seconds)[0]:
            self._read()

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._socket.close()

    def _send(self, view: memoryview) -> int:
        try:
            return self._socket.send(view)
        except BlockingIOError:
            return 0
        except OSError:
            self.is_open = False
            return 0

    def _read(self) -> None:
        try:
            received = len(self._socket.recv(_RECEIVE_BYTES))
        except BlockingIOError:
            return
        except OSError:
            received = 0
        self.num_received += received
        self.is_open = self.is_open and received > 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _string(text: bytes) -> bytes:
    return _number(len(text), 7, 0) + text


def _number(number: int, num_bits: int, first: int) -> bytes:
    """Return an integer of HPACK with a prefix of `num_bits` (RFC 7541, 5.1)."""
    limit = 2**num_bits - 1
    if number < limit:
        return bytes((first | number,))
    rest = [first | limit]
    number -= limit
    while number >= 128:
        rest.append(number % 128 | 128)
        number //= 128
    return bytes((*rest, number))
