"""Child processes that serve a socket: frames, and a memory limit enforced by the kernel."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import struct
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from pagedray.errors import EngineError, ShuttingDownError
from pagedray.machine import child_environment

__all__ = [
    "ChildProcess",
    "is_out_of_memory",
    "lift_memory_limit",
    "limit_memory",
    "read_frame",
    "read_message",
    "write_frame",
]

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_MAX_BYTES = 256 * 2**20
_STEP_BYTES = 2**20
_LENGTH = struct.Struct("!I")
_DISCARDED = bytearray(64 * 2**10)
"""Allocated in advance, since it is used when no memory is left."""

_DATA = 5
"""The field of statm with the pages of data and stacks."""


class ChildProcess(ABC):
    """Starts a process when it is first needed, and again after it has died. Thread-safe.

    The process serves the socket whose descriptor its command names, and sends a frame once it is
    ready. Methods with an underscore require the lock.
    """

    work: ClassVar[str]
    """A plural name of the structures that the process compiles, for errors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_closed = False

    @property
    def process_id(self) -> int | None:
        """The id of the process, if it was started."""
        return None if self._process is None else self._process.pid

    def start_process(self) -> None:
        """Start the process unless it is running. Raises EngineError."""
        with self._lock:
            self._running()

    def warm_up(self) -> None:
        """Start the process; if that fails, its first use tries again and reports the error."""
        try:
            self.start_process()
        except (EngineError, OSError) as error:
            logger.warning("%s", error)

    @abstractmethod
    def _command(self, descriptor: int) -> list[str]:
        """Return the arguments of Python for a process that serves this socket."""

    def _prepare(self, connection: socket.socket) -> None:  # noqa: B027  # few need it
        """Send a new process its first frames. Raises OSError."""

    def _running(self) -> socket.socket:
        """Return the connection to the process, which is started unless it is running."""
        if self._is_closed:
            raise ShuttingDownError
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._connection is None:
            self._connection = self._started()
        return self._connection

    def _started(self) -> socket.socket:
        ours, theirs = self._connected_sockets()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *self._command(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=child_environment() | _ENVIRONMENT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # The libraries log the texts of clients.
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise self._shortage_of(error) from error
        try:
            ours.settimeout(_START_TIMEOUT_S)
            self._prepare(ours)
            # The process is ready.
            read_frame(ours)
        except (OSError, EOFError) as error:
            ours.close()
            self._end()
            raise EngineError(f"Failed to start the process that compiles {self.work}.") from error
        return ours

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        self._connection, self._process = None, None

    def _connected_sockets(self) -> tuple[socket.socket, socket.socket]:
        try:
            return socket.socketpair()
        except OSError as error:
            raise self._shortage_of(error) from error

    def _shortage_of(self, error: OSError) -> EngineError:
        """Return the error for files or processes that the system lacks."""
        return EngineError(
            f"{self.work.capitalize()} cannot be compiled: {error.strerror}. Retry later."
        )


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
