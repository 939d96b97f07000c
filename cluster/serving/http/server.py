"""The HTTP server on one port: uvicorn on the caller's event loop, with limits that it lacks.

The head of a request must arrive in time, heads, chunk extensions and trailers are limited in size,
trailers replace no headers, and a request to upgrade to another protocol is served without it.
`HttpApp` rejects ambiguous requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
import msgspec
import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.serving.http.endpoint import error_body
from cluster.serving.http.request_checks import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    TOO_MANY_HEADERS,
    head_without_upgrade,
)
from cluster.serving.listener import BACKLOG, ConnectionLimits, listen
from cluster.serving.telemetry.log_lines import LineLimit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Message
    from uvicorn._types import ASGISendEvent
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from cluster.serving.http.app import HttpApp
    from cluster.serving.tls import CertificateStore

__all__ = ["ConnectionOptions", "HttpServer", "connection_kind"]

logger = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 16
_CLOSE_GRACE_S = 1.0
_CLOSE_POLL_S = 0.05
_RECEIVED_BYTES = 2**15
_COSTLY_S = 0.5
_MIN_CHUNK_BYTES = 64
_FREE_CHUNKS = 256
_SMALL_CHUNKS = (
    f"The chunks of a body must have {_MIN_CHUNK_BYTES} bytes on average after the first "
    f"{_FREE_CHUNKS}."
)


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
                note_freed=self._app.note_freed,
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


class _PipelinedRequestError(Exception):
    """A request that follows while the response before it is being written."""


class _CostlyRequestError(Exception):
    """A request that is not parsed to its end."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The options that all connections of a server share."""

    most_open: int
    """The number of open connections; further connections are closed at once."""
    read_timeout_s: float
    """The time that the head of a request may take to arrive."""
    note_rejection: Callable[[HTTPStatus, str], None]
    """Called with the status and the error of a request that does not reach the application."""
    note_freed: Callable[[int], None]
    """Called with the bytes of an incomplete head or body that is not kept any longer."""
    note_stall: Callable[[], None]
    """Called when the system ends a connection because its client does not read."""
    refused_lines: LineLimit = field(default_factory=LineLimit)
    invalid_lines: LineLimit = field(default_factory=LineLimit)


class HttpConnection(HttpToolsProtocol):
    """A connection on which requests follow one another."""

    options: ClassVar[ConnectionOptions]
    _num_unparsed = 0
    """Bytes since the parser last completed a head, a part of a body, or a request."""
    _num_chunks = 0
    """Pieces in which the parser has found the body of the request."""
    _num_body_bytes = 0
    _has_head = False
    """Whether the parser is between the head and the end of a request."""
    _head_timer: asyncio.TimerHandle | None = None

    # Any: uvicorn's base class leaves the transport's type to its caller.
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # What asyncio reads at once; reading pauses only after it.
        transport.max_size = _RECEIVED_BYTES
        if len(self.connections) > self.options.most_open:
            self._log(self.options.refused_lines, "HTTP connections beyond the limit")
            transport.abort()
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if isinstance(exc, TimeoutError):
            self.options.note_stall()
        self.options.note_freed(self._num_unparsed)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_answering:
            self._refuse_pipelined()
            return
        self._unset_keepalive_if_required()
        self._num_unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            if self._is_answering:
                self._refuse_pipelined()
            elif isinstance(error.__context__, _CostlyRequestError):
                # A client that repeats it at once gets few rejections a second.
                self.transport.pause_reading()
                costly = error.__context__
                self.loop.call_later(_COSTLY_S, self._reject, costly.status, costly.text)
            else:
                self._log(self.options.invalid_lines, "Requests that are not valid HTTP")
                self._reject(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP.")
            return
        if self._num_unparsed > MAX_HEAD_BYTES:
            self._reject(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"The head or trailers of the request exceed {MAX_HEAD_BYTES} bytes.",
            )

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise _PipelinedRequestError
        super().on_message_begin()
        self._num_chunks = self._num_body_bytes = 0
        self._watch_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are ignored: they must not replace headers, such as Authorization.
        if self._has_head:
            return
        if len(self.headers) >= MAX_HEADERS:
            raise _CostlyRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, TOO_MANY_HEADERS)
        # The parser keeps the whitespace after a value, which is not part of it.
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._num_unparsed = 0
        self._has_head = True
        self._stop_head_timer()
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _disable_chunks(self.cycle)
        if self.expect_100_continue:
            # A client that is answered before it sends its body may or may not send it then.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        self._num_chunks += 1
        self._num_body_bytes += len(body)
        if self._num_chunks > _FREE_CHUNKS + self._num_body_bytes // _MIN_CHUNK_BYTES:
            raise _CostlyRequestError(HTTPStatus.BAD_REQUEST, _SMALL_CHUNKS)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        self._has_head = False
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        # The rest of a body that the application has not read.
        self.cycle.body = bytearray()
        super().on_response_complete()

    def shutdown(self) -> None:
        """Close after the response; a partially received request gets none."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.transport.abort()
        else:
            super().shutdown()

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which calls the `on_` methods. Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser stops at an upgrade: the head is parsed again without it.
            head = head_without_upgrade(
                self.parser.get_method(), self.url, self.parser.get_http_version(), self.headers
            )
            self.parser = httptools.HttpRequestParser(self)
            try:
                self.parser.feed_data(head + data[upgrade.args[0] :])
            except httptools.HttpParserUpgrade as another:
                # CONNECT always is an upgrade.
                raise httptools.HttpParserError from another

    @property
    def _is_answering(self) -> bool:
        """Whether a request is complete and its response is not."""
        cycle = self.cycle
        return cycle is not None and not (cycle.response_complete or cycle.more_body)

    def _refuse_pipelined(self) -> None:
        """Have the client send its next request again on another connection.

        Only reading on detects a disconnect, and only not reading makes a client wait.
        """
        self.cycle.keep_alive = False

    def _reject(self, status: HTTPStatus, text: str) -> None:
        """Respond instead of the application, and close."""
        self.options.note_rejection(status, text)
        # A client would take a second response for the response to its next request.
        if not (self._has_head and self.cycle is not None and self.cycle.response_started):
            body = msgspec.json.encode(error_body(text, "invalid_request_error"))
            self.transport.write(
                b"%bcontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (STATUS_LINE[status], len(body), body)
            )
        self.transport.close()

    def _log(self, lines: LineLimit, what: str) -> None:
        if num_events := lines.count_event():
            host = self.client[0] if self.client else "an unknown address"
            logger.warning("%s: %d, the last one from %s.", what, num_events, host)

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.options.read_timeout_s, self._end_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_late(self) -> None:
        self.transport.abort()


def connection_kind(options: ConnectionOptions) -> type[HttpConnection]:
    """Return a connection class for uvicorn, which passes no arguments of ours."""
    return type("HttpConnection", (HttpConnection,), {"options": options})


def _disable_chunks(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection end a response without a length, as HTTP/1.0 requires."""
    cycle.chunked_encoding = False
    send = cycle.send

    async def send_unchunked(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            # uvicorn compares it with the length of the body, which it does not know.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]  # uvicorn makes the cycle
