"""Frames on a socket: a length of four bytes, followed by as many bytes."""

import socket
import struct

__all__ = ["read_frame", "write_frame"]

_MAX_BYTES = 256 * 2**20
_LENGTH = struct.Struct("!I")
_DISCARDED = bytearray(64 * 2**10)
"""Allocated in advance, since it is used when no memory is left."""


def write_frame(connection: socket.socket, body: bytes) -> None:
    """Send a frame. Raises OSError."""
    connection.sendall(_LENGTH.pack(len(body)) + body)


def read_frame(connection: socket.socket) -> bytearray:
    """Return the next frame. Raises OSError, or EOFError if the other end closes.

    Raises MemoryError if it does not fit in memory; the frames after it can still be read.
    """
    prefix = bytearray(_LENGTH.size)
    _fill(connection, memoryview(prefix))
    (length,) = _LENGTH.unpack(prefix)
    if length > _MAX_BYTES:
        raise EOFError(f"Frame of {length} bytes exceeds the maximum of {_MAX_BYTES}.")
    try:
        body = bytearray(length)
    except MemoryError:
        _discard(connection, length)
        raise
    _fill(connection, memoryview(body))
    return body


def _fill(connection: socket.socket, room: memoryview) -> None:
    while room:
        room = room[_received(connection, room) :]


def _discard(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= _received(connection, memoryview(_DISCARDED)[:num_bytes])


def _received(connection: socket.socket, room: memoryview) -> int:
    num_bytes = connection.recv_into(room)
    if not num_bytes:
        raise EOFError("Connection closed by the other end.")
    return num_bytes
