"""Accepts connections, within limits and without a busy loop when descriptors run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from asyncio.sslproto import SSLProtocol
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from cluster.serving.connections.client_host import client_host
from cluster.serving.http.read_lines import MAX_CHECK_BYTES, read_line
from cluster.serving.telemetry.line_limit import LineLimit
from pagedray.text import pluralize

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from cluster.serving.connections.connection_limits import ConnectionLimits
    from cluster.serving.intake.read_turns import ReadTurns

__all__ = ["Acceptor"]

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 16
_ACCEPT_LINE = "connections"
"""Where they wait for their turn among the reads of hosts."""
_PAUSE_S = 1.0
_HANDSHAKE_TIMEOUT_S = 10
_NO_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class _TlsProtocol(SSLProtocol):
    """asyncio's TLS, which would hold a buffer of 256 KiB for each connection."""

    max_size = 2**15


class Acceptor:
    """Accepts the connections of a listening socket until it is closed.

    asyncio's own server has no limits, and logs thousands of tracebacks a second while the process
    has no descriptor left.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Callable[[], None], bool], asyncio.Protocol],
        *,
        limits: ConnectionLimits,
        read_turns: ReadTurns,
        answer_check: Callable[[bytes], bytes | None],
        context: ssl.SSLContext | None,
    ) -> None:
        """Begin to accept connections, in the running event loop.

        `make_protocol` is given what its connection must call when it is lost, and whether its
        first read has its turn already.

        Opening a connection takes as long as reading a request, so `read_turns` decides when.
        Accepting takes less, and happens earlier: a health check would wait in the system's queue
        behind all other connections. A connection without TLS is not opened if `answer_check`
        returns a response to all that it has received.
        """
        self._listener = listener
        # asyncio describes a socket whenever its reader is new, which takes calls of the system.
        self._descriptor = listener.fileno()
        self._make_protocol = make_protocol
        self._limits = limits
        self._read_turns = read_turns
        self._answer_check = answer_check
        self._context = context
        self._num_open = 0
        self._num_open_by_host: Counter[str] = Counter()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._lines = LineLimit()
        self._resuming: asyncio.TimerHandle | None = None
        self._unopened: dict[socket.socket, str] = {}
        """Accepted connections that wait for their turn to be opened, and their hosts."""
        self._is_closed = False
        self._loop.add_reader(self._descriptor, self._accept_waiting)

    def close(self) -> None:
        """Accept no more connections."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._descriptor)
        self._listener.close()
        for connection, host in self._unopened.items():
            connection.close()
            self._release(host)
        self._unopened.clear()

    async def wait_closed(self) -> None:
        """Wait for the handshakes that have begun."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _accept_waiting(self) -> None:
        if self._read_turns.take():
            self._accept_some()
        else:
            self._loop.remove_reader(self._descriptor)
            self._read_turns.wait(_ACCEPT_LINE, self._accept_in_turn, 0)

    def _accept_in_turn(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._descriptor, self._accept_waiting)
            self._accept_some()

    def _accept_some(self) -> None:
        # Others have their turn on the event loop after some.
        for _ in range(_MAX_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    raise
                self._pause(error)
                return
            self._take(connection, client_host(address[0]))

    def _take(self, connection: socket.socket, host: str) -> None:
        if self._num_open >= self._limits.total:
            connection.close()
            self._log(f"all {self._limits.total} connections of the HTTP frontend are open")
        elif self._num_open_by_host[host] >= self._limits.per_host:
            connection.close()
            self._log(
                f"{host} has {pluralize(self._limits.per_host, 'connection')}, "
                "the most for one host"
            )
        else:
            connection.setblocking(False)
            begun = _received(connection)
            if begun is not None and self._answer_if_check(connection, begun):
                return
            self._num_open += 1
            self._num_open_by_host[host] += 1
            if self._read_turns.take():
                self._begin_open(connection, host, has_turn=False)
            else:
                self._wait_turn(connection, host, begun)

    def _wait_turn(self, connection: socket.socket, host: str, begun: bytes | None) -> None:
        line = f"connections of {host}" if begun is None else read_line(host, begun, is_first=True)

        def open_in_turn() -> None:
            if self._unopened.pop(connection, None) is None:
                return
            received = _received(connection) if begun is None else begun
            if received is not None and self._answer_if_check(connection, received):
                self._release(host)
            else:
                self._begin_open(connection, host, has_turn=bool(received))

        self._unopened[connection] = host
        self._read_turns.wait(line, open_in_turn, 0)

    def _answer_if_check(self, connection: socket.socket, received: bytes) -> bool:
        """Answer and close a connection that has received a health check and nothing else."""
        if self._context is not None:
            return False
        response = self._answer_check(received)
        if response is None:
            return False
        with connection, suppress(OSError):
            # A socket that is closed with unread bytes is reset, which may discard the response.
            connection.recv(len(received))
            connection.send(response)
        return True

    def _begin_open(self, connection: socket.socket, host: str, *, has_turn: bool) -> None:
        task = self._loop.create_task(self._open(connection, host, has_turn=has_turn))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _open(self, connection: socket.socket, host: str, *, has_turn: bool) -> None:
        is_counted = True

        def release() -> None:
            nonlocal is_counted
            if is_counted:
                is_counted = False
                self._release(host)

        try:
            if self._context is None:
                await self._loop.connect_accepted_socket(
                    lambda: self._make_protocol(release, has_turn), connection
                )
            else:
                # The data so far is the handshake.
                protocol = self._make_protocol(release, False)
                await self._open_tls(connection, protocol, self._context)
        except OSError:
            # The client went away, or does not speak TLS.
            release()
        except BaseException:
            release()
            raise

    async def _open_tls(
        self, connection: socket.socket, protocol: asyncio.Protocol, context: ssl.SSLContext
    ) -> None:
        """Raises OSError if the handshake fails."""
        has_ended = self._loop.create_future()
        tls = _TlsProtocol(
            self._loop,
            protocol,
            context,
            has_ended,
            server_side=True,
            ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S,
        )
        transport, _ = await self._loop.connect_accepted_socket(lambda: tls, connection)
        try:
            await has_ended
        except BaseException:
            transport.close()
            raise

    def _release(self, host: str) -> None:
        self._num_open -= 1
        self._num_open_by_host[host] -= 1
        if not self._num_open_by_host[host]:
            del self._num_open_by_host[host]

    def _pause(self, error: OSError) -> None:
        self._log(f"the system has no resources for them ({error.strerror})")
        self._loop.remove_reader(self._descriptor)
        self._resuming = self._loop.call_later(
            _PAUSE_S, self._loop.add_reader, self._descriptor, self._accept_waiting
        )

    def _log(self, reason: str) -> None:
        if self._lines.count_event():
            logger.warning(
                "HTTP connections are refused: %s. Raise the limit of open files (ulimit -n) if "
                "these are your clients.",
                reason,
            )


def _received(connection: socket.socket) -> bytes | None:
    """Return the first bytes received on a connection, and leave them there.

    None if nothing has arrived, or the client has reset the connection.
    """
    try:
        return connection.recv(MAX_CHECK_BYTES + 1, socket.MSG_PEEK)
    except OSError:
        return None
