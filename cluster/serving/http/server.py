"""The HTTP server on one port: uvicorn on the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn
from starlette.requests import Request

from cluster.serving.connections.connection_limits import ConnectionLimits
from cluster.serving.connections.listener import BACKLOG, listen
from cluster.serving.http.connection import ConnectionOptions, connection_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Message

    from cluster.serving.connections.tls import CertificateStore
    from cluster.serving.http.app import HttpApp

__all__ = ["HttpServer"]

_ACCEPTED_AT_ONCE = 16
_CLOSE_GRACE_S = 1.0
_CLOSE_POLL_S = 0.05


class HttpServer:
    """The HTTP frontend, from binding its port to closing it."""

    def __init__(
        self,
        app: HttpApp,
        *,
        host: str,
        port: int,
        certificates: CertificateStore | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """Without certificates, TLS is disabled."""
        self._limits = ConnectionLimits() if limits is None else limits
        self._app = app
        self._host = host
        self._wanted_port = port
        self._certificates = certificates
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0
        """The bound port; 0 until it is bound."""

    async def start_server(self) -> None:
        """Bind the port and serve. Raises DeviceError if the port is not available."""
        # Its first call imports modules for 50 ms, in which no other request would be served.
        await Request({"type": "http"}, _receive_nothing).is_disconnected()
        listener = listen("HTTP", self._host, self._wanted_port)
        self.port = listener.getsockname()[1]
        certificates = self._certificates
        # Connections inherit it: the system ends a connection if its client does not read.
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._app.write_timeout_s * 1e3)
        )
        kind = connection_kind(
            ConnectionOptions(
                most_open=self._limits.total,
                read_timeout_s=self._app.read_timeout_s,
                note_rejection=self._app.note_unreadable,
                note_stall=self._app.count_stalled,
            )
        )
        config = uvicorn.Config(
            self._app,
            http=kind,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            # asyncio accepts as many connections at once.
            backlog=_ACCEPTED_AT_ONCE,
            server_header=False,
            proxy_headers=False,
            ssl_context_factory=None
            if certificates is None
            else lambda _config, _default: certificates.server_context,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        listener.listen(BACKLOG)

    async def stop_server(self) -> None:
        """Accept no more connections, and close the idle connections, then the others."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait((self._task,), timeout=_CLOSE_GRACE_S)
        # uvicorn would cancel running requests and log a traceback for each; aborted connections
        # end them as if the client had disconnected. A connection that was being opened comes
        # later, and uvicorn would wait for as long as its client keeps it open.
        while not self._task.done():
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait((self._task,), timeout=_CLOSE_POLL_S)
        await self._task
        self._server = self._task = None


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _receive_nothing() -> Message:
    return {"type": "http.request"}
