"""All sockets of this process: gRPC does not report its own sockets."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.serving.text.thread_pauses import ThreadPauses

__all__ = [
    "end_connection",
    "num_received_bytes",
    "open_sockets",
    "peer_address",
    "resume_connection",
    "stall_connection",
]

_DESCRIPTORS = "/proc/self/fd"
_INFO_BYTES = 136
_RECEIVED_OFFSET = 128
"""Offset of `tcpi_bytes_received` in Linux's `struct tcp_info`."""
_DISCARDED_BYTES = 2**20
_MAPPED = "::ffff:"
_ATTACH_FILTER = 26
_DETACH_FILTER = 27
"""Linux's SO_ATTACH_FILTER and SO_DETACH_FILTER."""
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""A socket filter of one instruction: return 0, the number of bytes to keep."""


def open_sockets(pauses: ThreadPauses) -> dict[int, int]:
    """Return the descriptors of all sockets by their inodes. Raises OSError without a descriptor.

    An inode belongs to one socket for as long as that is open, unlike a descriptor's number.
    """
    found: dict[int, int] = {}
    with os.scandir(_DESCRIPTORS) as entries:
        for entry in entries:
            pauses.pause_if_due(time.thread_time())
            with suppress(OSError):
                status = os.fstat(int(entry.name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(entry.name)
    return found


def peer_address(descriptor: int, port: int) -> tuple[str, int] | None:
    """Return a client's host and port if a socket is a connection to a port of this process.

    gRPC's sockets are of IPv6, where IPv4 addresses have a prefix, which is removed.
    """
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                # A listening or closed socket has no peer.
                peer_host, peer_port = connection.getpeername()[:2]
                if connection.getsockname()[1] == port:
                    return peer_host.removeprefix(_MAPPED), peer_port
        finally:
            # gRPC owns it.
            connection.detach()
    return None


def num_received_bytes(descriptor: int) -> int:
    """Return how much a TCP connection has received; 0 if the system does not report it."""
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        finally:
            connection.detach()
        if len(info) >= _INFO_BYTES:
            return int(struct.unpack_from("=Q", info, _RECEIVED_OFFSET)[0])
    return 0


def end_connection(descriptor: int, inode: int) -> None:
    """End a connection, which its owner then closes, and drop its unread data."""
    # Its owner may have closed it meanwhile, but a duplicate stays what it is.
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.shutdown(socket.SHUT_RDWR)
            flags = socket.MSG_DONTWAIT | socket.MSG_TRUNC
            while connection.recv(_DISCARDED_BYTES, flags):
                pass


def stall_connection(descriptor: int, inode: int) -> bool:
    """Let the system drop all that a client sends from now on; return whether it can (Linux).

    The client sends dropped packets again, more and more slowly, where it could connect again at
    once after `end_connection`. Nothing is lost if the connection is resumed.
    """
    instructions = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    program = struct.pack("@HP", 1, ctypes.addressof(instructions))
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
            return True
    return False


def resume_connection(descriptor: int, inode: int) -> None:
    """Receive again from the client of a stalled connection."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
