"""The HTTP server on one port: uvicorn on the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import uvicorn
from starlette.requests import Request

from cluster.serving.connections.connection_limits import ConnectionLimits
from cluster.serving.connections.listener import listen
from cluster.serving.http.acceptor import Acceptor
from cluster.serving.http.connection import ConnectionOptions, HttpConnection, connection_kind
from cluster.serving.http.quick_checks import QuickChecks

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from starlette.types import Message

    from cluster.serving.connections.tls import CertificateStore
    from cluster.serving.http.app import HttpApp

__all__ = ["HttpServer"]

_CLOSE_GRACE_S = 1.0
_DATE_PERIOD_S = 1.0
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
        kind = connection_kind(
            ConnectionOptions(
                read_timeout_s=self._app.read_timeout_s,
                write_timeout_s=self._app.write_timeout_s,
                note_rejection=self._app.note_unreadable,
                note_stall=self._app.count_stalled,
                read_turns=self._app.read_turns,
            )
        )
        config = uvicorn.Config(
            self._app,
            http=kind,
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
        self._server = _Server(config, kind, self._limits, self._app)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)

    async def stop_server(self) -> None:
        """Accept no more connections, and close the idle connections, then the others."""
        if self._server is None or self._task is None:
            return
        self._server.request_exit()
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
    """A uvicorn server that limits connections, and leaves signals to its process."""

    def __init__(
        self,
        config: uvicorn.Config,
        kind: type[HttpConnection],
        limits: ConnectionLimits,
        app: HttpApp,
    ) -> None:
        super().__init__(config)
        self._kind = kind
        self._limits = limits
        self._read_turns = app.read_turns
        self._checks = QuickChecks(app.passes_check, lambda: self.server_state.default_headers)
        self._exit_requested = asyncio.Event()

    def request_exit(self) -> None:
        """End the main loop at once."""
        self.should_exit = True
        self._exit_requested.set()

    async def main_loop(self) -> None:
        """Renew the date of responses until the exit; uvicorn's loop looks at it every 0.1 s."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit_requested.wait(), _DATE_PERIOD_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await self.lifespan.startup()
        # uvicorn only closes them and waits for that.
        self.servers = [
            Acceptor(  # type: ignore[misc]  # not an asyncio.Server
                listener,
                self._make_connection,
                limits=self._limits,
                read_turns=self._read_turns,
                answer_check=self._checks.response_to,
                context=self.config.ssl,
            )
            for listener in sockets
        ]
        self.started = True

    def _make_connection(self, note_lost: Callable[[], None], has_turn: bool) -> HttpConnection:
        connection = self._kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        connection.note_lost = note_lost
        connection.has_turn = has_turn
        return connection

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _receive_nothing() -> Message:
    return {"type": "http.request"}
