"""Accepts connections, within limits and without a busy loop when descriptors run out."""

from __future__ import annotations

import asyncio
import errno
import logging
from asyncio.sslproto import SSLProtocol
from collections import Counter
from typing import TYPE_CHECKING

from cluster.serving.connections.client_host import client_host
from cluster.serving.telemetry.line_limit import LineLimit

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from cluster.serving.connections.connection_limits import ConnectionLimits

__all__ = ["Acceptor"]

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 4
_PAUSE_S = 1.0
_HANDSHAKE_TIMEOUT_S = 10
_NO_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class _TlsProtocol(SSLProtocol):
    """asyncio's TLS, which would hold a buffer of 256 KiB for each connection."""

    max_size = 2**15


class Acceptor:
    """Accepts the connections of a listening socket until it is closed.

    asyncio's own server has no limits, and logs thousands of traces a second while the process has
    no descriptor left.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Callable[[], None]], asyncio.Protocol],
        *,
        limits: ConnectionLimits,
        context: ssl.SSLContext | None,
    ) -> None:
        """`make_protocol` is given what its connection must call when it is lost."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._limits = limits
        self._context = context
        self._num_open = 0
        self._num_open_by_host: Counter[str] = Counter()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._lines = LineLimit()
        self._resuming: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._loop.add_reader(listener, self._accept_waiting)

    def close(self) -> None:
        """Accept no more connections."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Wait for the handshakes that have begun."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _accept_waiting(self) -> None:
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
            self._log(f"{host} has {self._limits.per_host} connections, the most for one host")
        else:
            connection.setblocking(False)
            self._num_open += 1
            self._num_open_by_host[host] += 1
            task = self._loop.create_task(self._open(connection, host))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _open(self, connection: socket.socket, host: str) -> None:
        is_counted = True

        def release() -> None:
            nonlocal is_counted
            if is_counted:
                is_counted = False
                self._release(host)

        try:
            if self._context is None:
                await self._loop.connect_accepted_socket(
                    lambda: self._make_protocol(release), connection
                )
            else:
                await self._open_tls(connection, self._make_protocol(release), self._context)
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
        self._loop.remove_reader(self._listener)
        self._resuming = self._loop.call_later(
            _PAUSE_S, self._loop.add_reader, self._listener, self._accept_waiting
        )

    def _log(self, reason: str) -> None:
        if self._lines.count_event():
            logger.warning(
                "HTTP connections are refused: %s. Raise the limit of open files (ulimit -n) if "
                "these are clients of yours.",
                reason,
            )
