"""A client's HTTP connection: uvicorn's, made strict about time, size and ambiguous requests.

It serves one request at a time, times out waiting for a request head and for a client that does not
read, limits the size of heads, chunk extensions and trailers and the numbers of headers and chunks,
rejects requests that another HTTP parser might read differently (request smuggling), and always
notices that the client has disconnected.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.serving.connections.client_host import client_host
from cluster.serving.connections.timer import Timer
from cluster.serving.http.errors import error_body
from cluster.serving.http.held_bytes import MAX_HEAD_BYTES, HeldBytes, HeldTotal
from cluster.serving.http.read_lines import read_line
from cluster.serving.http.request_head import (
    head_without_upgrade,
    is_ambiguous,
    num_head_bytes,
)
from cluster.serving.http.request_parts import RequestParts
from cluster.serving.http.unchunked_response import disable_chunks
from cluster.serving.intake.read_turns import ReadTurns
from cluster.serving.telemetry.line_limit import LineLimit

__all__ = ["IS_FIRST_KEY", "ConnectionOptions", "HttpConnection", "connection_kind"]

logger = logging.getLogger(__name__)

IS_FIRST_KEY = "pagedray.is_first"
"""The key in the ASGI scope for whether a request is the first one of its connection."""

_RECEIVED_BYTES = 2**16
"""Bytes of a body that are taken from the system before the application counts them."""
_NO_LINGER = struct.pack("ii", 1, 0)


class _InvalidRequestError(Exception):
    """A request that the parser accepts but that must be rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The common options of a server's connections."""

    read_timeout_s: float
    """How long a request's head may take to arrive."""
    write_timeout_s: float
    """How long the client may leave written data unread."""
    note_rejection: Callable[[HTTPStatus, str], None]
    """Called with the status and the error of a request that does not reach the application."""
    note_stall: Callable[[], None]
    """Called for a client that is disconnected because it does not read."""
    read_turns: ReadTurns
    """Decides when received bytes are handled."""
    held: HeldTotal = field(default_factory=HeldTotal)
    invalid_lines: LineLimit = field(default_factory=LineLimit)
    """Limits the log lines about invalid requests."""


class HttpConnection(HttpToolsProtocol):
    """A connection on which requests follow one another.

    A pipelined request is not served: only reading on detects a disconnect, and only not reading
    makes a client wait. HTTP has the client send it again on another connection.
    """

    options: ClassVar[ConnectionOptions]
    note_lost: Callable[[], None]
    """Called when the connection is lost."""
    has_turn = False
    """Whether data that arrived before the connection was opened is handled at once."""
    _unhandled = b""
    """Received data that waits for its turn."""
    _head_timer: Timer
    """Runs until the head of a request has arrived."""
    _write_timer: Timer
    """Runs while writing is paused, and while the rest of a complete response is unsent."""
    _held: HeldBytes
    """Data that the parser has not completed."""
    _has_head = False
    """Whether the parser is between the head and the end of a request."""
    _has_long_head = False
    _parts: RequestParts
    """Counts of the request's headers and chunks."""

    # Any: uvicorn's base class leaves the transport's type to its caller.
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            # Bytes that asyncio reads at once; reading pauses only after them.
            transport.max_size = _RECEIVED_BYTES
        self._parts = RequestParts()
        self._held = HeldBytes(self.options.held)
        self._head_timer = Timer(self.loop)
        self._write_timer = Timer(self.loop)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.stop()
        self._write_timer.stop()
        self._held.forget()
        self._held.update_total()
        super().connection_lost(exc)
        self._unhandled = b""
        if self.cycle is not None:
            # Objects that refer to one another are freed late.
            self.cycle.body = bytearray()
        self.note_lost()

    def data_received(self, data: bytes) -> None:
        if self._unhandled:
            # Reading was resumed for another reason.
            self._unhandled += data
        elif self.has_turn or self.options.read_turns.take(len(data)):
            self.has_turn = False
            self._handle(data)
        else:
            self._unset_keepalive_if_required()
            self._unhandled = data
            self.transport.pause_reading()
            host = client_host(self.client[0]) if self.client else ""
            line = read_line(host, data, is_first=self.cycle is None)
            self.options.read_turns.wait(line, self._handle_waiting, len(data))

    def _handle_waiting(self) -> None:
        data, self._unhandled = self._unhandled, b""
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self._handle(data)

    def _handle(self, data: bytes) -> None:
        if self._is_answering:
            self._reject_pipelined()
            return
        self._unset_keepalive_if_required()
        if self._write_timer.is_running and not self.transport.get_write_buffer_size():
            # The client has read the response.
            self._write_timer.stop()
        self._held.add(len(data))
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._reject_unread()
            return
        self._held.update_total()
        if self._held.is_long:
            self._reject_long()
        elif self._held.has_no_room:
            self._reject_large("The server is receiving too many long heads of requests.")
        elif self._is_waiting_for_head:
            self._watch_head()
        else:
            self._head_timer.stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        # It may run for the response before.
        self._write_timer.stop()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer.stop()

    def on_response_complete(self) -> None:
        # The part of a body that was received and not read.
        self.cycle.body = bytearray()
        super().on_response_complete()
        self._watch_rest()

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise _InvalidRequestError
        self._parts = RequestParts()
        super().on_message_begin()
        self.scope[IS_FIRST_KEY] = self.cycle is None  # type: ignore[literal-required]  # ours

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parts.num_headers += 1
        if self._parts.has_many_headers:
            raise _InvalidRequestError
        # Trailers are ignored: they must not replace headers, such as Authorization.
        if not self._has_head:
            # The parser keeps the whitespace after a value, which is not part of it.
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        if num_head_bytes(self.url, self.headers) > MAX_HEAD_BYTES:
            self._has_long_head = True
            raise _InvalidRequestError
        self._held.forget()
        self._has_head = True
        if self.parser.should_upgrade():
            return
        if is_ambiguous(self.parser.get_http_version(), self.headers):
            raise _InvalidRequestError
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            disable_chunks(self.cycle)
        if self.expect_100_continue:
            # A client that is answered before it sends its body may or may not send it then.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._held.forget()
        self._parts.num_chunks += 1
        self._parts.num_body_bytes += len(body)
        if self._parts.has_small_chunks:
            raise _InvalidRequestError
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held.forget()
        self._has_head = False
        if not self.parser.should_upgrade():
            super().on_message_complete()

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
            # A server that does not support the other protocol ignores the upgrade, but the parser
            # stops at it: the head is parsed again without it.
            head = head_without_upgrade(
                self.parser.get_method(),
                self.url,
                self.parser.get_http_version(),
                self.headers,
            )
            self.parser = httptools.HttpRequestParser(self)
            try:
                self.parser.feed_data(head + data[upgrade.args[0] :])
            except httptools.HttpParserUpgrade as another:
                # CONNECT always is an upgrade.
                raise httptools.HttpParserError from another

    @property
    def _is_waiting_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        """Whether a request is complete and its response is not."""
        return not self._is_waiting_for_head and not self.cycle.more_body

    def _reject_unread(self) -> None:
        if self._is_answering:
            self._reject_pipelined()
        elif self._has_long_head:
            self._reject_long()
        elif (rejection := self._parts.rejection()) is not None:
            self._reject(*rejection)
        else:
            self._log_invalid()
            self._reject(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP.")

    def _log_invalid(self) -> None:
        num_requests = self.options.invalid_lines.count_event()
        if num_requests:
            logger.warning(
                "Requests that are not valid HTTP: %d, the last one from %s.",
                num_requests,
                self.client[0] if self.client else "an unknown address",
            )

    def _reject_long(self) -> None:
        self._reject_large(f"The head or trailers of the request exceed {MAX_HEAD_BYTES} bytes.")

    def _reject_large(self, text: str) -> None:
        self._reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)

    def _reject_pipelined(self) -> None:
        self.cycle.keep_alive = False

    def _reject(self, status: HTTPStatus, text: str) -> None:
        """Respond instead of the application, and close."""
        self._head_timer.stop()
        self.options.note_rejection(status, text)
        if self._has_head and self.cycle is not None and self.cycle.response_started:
            # The request has its response, and the client would take another response for the next
            # request's.
            self.transport.close()
            return
        body = msgspec.json.encode(error_body(text, "invalid_request_error"))
        self.transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[status], len(body), body)
        )
        self.transport.close()
        self._watch_rest()

    def _watch_rest(self) -> None:
        """Give the client time to read the rest of a response."""
        # It may be too short to pause writing; a connection that is closed waits for it, too.
        if self.transport.get_write_buffer_size():
            self._start_write_timer()

    def _start_write_timer(self) -> None:
        self._write_timer.start(self.options.write_timeout_s, self._end_stalled)

    def _end_stalled(self) -> None:
        if self._is_answering and not self.flow.write_paused:
            # The timer was for the response before.
            return
        if self.transport.get_write_buffer_size():
            self.options.note_stall()
            # Without lingering, the system drops unsent data, and resets the connection.
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.transport.abort()

    def _watch_head(self) -> None:
        """Give the client time to send a head."""
        self._head_timer.start(self.options.read_timeout_s, self.transport.abort)


def connection_kind(options: ConnectionOptions) -> type[HttpConnection]:
    """Return a connection class for uvicorn, which passes no arguments of ours."""
    return type("HttpConnection", (HttpConnection,), {"options": options})
