"""The HTTP server on one port: uvicorn on the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import uvicorn

from cluster.serving.http.connection import connection_kind
from cluster.serving.listener import listen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.http.app import HttpApp
    from cluster.serving.tls import CertificateStore

__all__ = ["HttpServer"]

_CLOSE_GRACE_S = 1.0


class HttpServer:
    """The HTTP frontend, from a bound port to a closed one."""

    def __init__(
        self,
        app: HttpApp,
        *,
        host: str,
        port: int,
        certificates: CertificateStore | None = None,
    ) -> None:
        """Without certificates, TLS is disabled."""
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
        listener = listen("HTTP", self._host, self._wanted_port)
        self.port = listener.getsockname()[1]
        certificates = self._certificates
        config = uvicorn.Config(
            self._app,
            http=connection_kind(
                self._app.read_timeout_s,
                self._app.write_timeout_s,
                note_refusal=self._app.count_unreadable,
                note_stall=self._app.count_stalled,
            ),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
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

    async def stop_server(self) -> None:
        """Accept no more connections, and close the idle ones, then the others."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait((self._task,), timeout=_CLOSE_GRACE_S)
        # uvicorn would cancel running requests and log a traceback for each; aborted connections
        # end them as if the client had disconnected.
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await self._task
        self._server = self._task = None


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
