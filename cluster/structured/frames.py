"""Frames on a socket: a length of four bytes, then so many bytes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

__all__ = ["read_frame", "write_frame"]

_MAX_BYTES = 256 * 2**20
_LENGTH = struct.Struct("!I")


def write_frame(connection: socket.socket, body: bytes) -> None:
    """Send a frame. Raises OSError."""
    connection.sendall(_LENGTH.pack(len(body)) + body)


def read_frame(connection: socket.socket) -> bytes:
    """Return the next frame. Raises OSError, or EOFError when the other end closes."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MAX_BYTES:
        raise EOFError(f"A frame of {length} bytes is over {_MAX_BYTES}.")
    return _read(connection, length)


def _read(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(min(size - len(received), 1 << 20))
        if not chunk:
            raise EOFError("The other end has closed.")
        received += chunk
    return bytes(received)
