"""Tools of child processes: frames on a socket, and a memory limit enforced by the kernel."""

from __future__ import annotations

import resource
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import socket

__all__ = [
    "is_out_of_memory",
    "lift_memory_limit",
    "limit_memory",
    "read_frame",
    "read_message",
    "write_frame",
]

_MAX_BYTES = 256 * 2**20
_STEP_BYTES = 2**20
_LENGTH = struct.Struct("!I")
_DISCARDED = bytearray(64 * 2**10)
"""Allocated in advance, since it is used when no memory is left."""

_DATA = 5
"""The field of statm with the pages of data and stacks."""


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
    body = bytearray()
    try:
        # The memory is used as bytes arrive, so a corrupt length costs nothing.
        while len(body) < length:
            first = len(body)
            body += bytes(min(_STEP_BYTES, length - first))
            _fill(connection, memoryview(body)[first:])
    except MemoryError:
        _discard(connection, length - len(body))
        raise
    return body


def read_message(connection: socket.socket, kind: Any) -> Any:  # Any: a type or a union
    """Return the message in the next frame. Raises as `read_frame` does.

    Raises EOFError also if it is no such message: the other end is broken then.
    """
    try:
        return msgspec.msgpack.decode(read_frame(connection), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EOFError(f"Invalid message: {error}.") from error


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


def limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more memory than it has."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[_DATA])
    maximum = num_pages * resource.getpagesize() + num_bytes
    # RLIMIT_DATA instead of RLIMIT_AS: each thread reserves far more addresses than it uses.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lift_memory_limit() -> None:
    """Lift the limit, so that this process can report its result."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out."""
    # The second is how xgrammar reports it.
    return isinstance(error, MemoryError) or "std::bad_alloc" in str(error)
