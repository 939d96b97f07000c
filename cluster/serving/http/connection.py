"""One client's HTTP connection: uvicorn's, but strict where uvicorn lets a client hold it.

It serves one request at a time, waits a bounded time for the next head, bounds what is no body,
refuses what two readers of HTTP might read in two ways, and notices at any moment that the client
has gone. What a request says is not known here.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.serving.http.errors import error_body

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["MAX_HEAD_BYTES", "HttpConnection", "connection_kind"]

MAX_HEAD_BYTES = 2**16
"""What a head, or what stands between and behind the parts of a body, may have."""

_VERSIONS = ("1.0", "1.1")


class _InvalidRequestError(Exception):
    """A request that the parser takes, and that is not to be taken."""


class HttpConnection(HttpToolsProtocol):
    """A connection on which requests follow one another.

    A request that comes before the answer to the last is not taken: reading on would be the only
    way to see that the client has gone, and not reading the only way to make it wait. HTTP has
    the client send it again, on another connection.
    """

    read_timeout_s: ClassVar[float]
    """What a request's head may take to arrive."""
    note_refusal: Callable[[], None]
    """Called when a request is refused here."""
    _head_timer: asyncio.TimerHandle | None = None
    _num_held_bytes = 0
    """What came since the parser last made a head or a part of a body of it."""
    _has_head = False
    """Whether the parser is behind the head of a request, and not behind its end."""
    _has_long_head = False

    # Any: uvicorn's base class leaves the transport's type to its caller.
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_answering:
            self._refuse_pipelined()
            return
        self._unset_keepalive_if_required()
        self._num_held_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse_unread()
            return
        if self._num_held_bytes > MAX_HEAD_BYTES:
            self._refuse_long()
        elif self._is_waiting_for_head:
            self._watch_head()
        else:
            self._stop_watching()

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise _InvalidRequestError
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # What follows a body has no say in who sent it, or in anything else.
        if not self._has_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if _num_bytes(self.url, self.headers) > MAX_HEAD_BYTES:
            self._has_long_head = True
            raise _InvalidRequestError
        self._num_held_bytes = 0
        self._has_head = True
        if self.parser.should_upgrade():
            return
        self._check_head()
        super().on_headers_complete()
        if self.expect_100_continue:
            # Who is answered before it has sent its body need not send that, or may.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_held_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_held_bytes = 0
        self._has_head = False
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def shutdown(self) -> None:
        """Close once the answer is given; a request that is half sent gets none."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.transport.abort()
        else:
            super().shutdown()

    def _parse(self, data: bytes) -> None:
        """Have the parser call what it finds. Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # HTTP has a server that does not know the other protocol answer as if it had not been
            # offered, but the parser takes what follows for that protocol.
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            try:
                self.parser.feed_data(head + data[upgrade.args[0] :])
            except httptools.HttpParserUpgrade as another:
                # CONNECT, which is an upgrade by itself.
                raise httptools.HttpParserError from another

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def _check_head(self) -> None:
        """Raise what makes the parser fail if somebody else might read the head otherwise."""
        names = [name for name, _ in self.headers]
        version = self.parser.get_http_version()
        num_hosts = names.count(b"host")
        if version not in _VERSIONS or num_hosts > 1 or (version == "1.1" and not num_hosts):
            raise _InvalidRequestError
        if b"transfer-encoding" in names:
            coding = dict(self.headers)[b"transfer-encoding"]
            if names.count(b"transfer-encoding") > 1 or coding.lower() != b"chunked":
                raise _InvalidRequestError

    @property
    def _is_waiting_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        """Whether all of a request is there and its answer is not."""
        return not self._is_waiting_for_head and not self.cycle.more_body

    def _refuse_unread(self) -> None:
        if self._is_answering:
            self._refuse_pipelined()
        elif self._has_long_head:
            self._refuse_long()
        else:
            self.logger.warning("Invalid HTTP request received.")
            self._refuse(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP.")

    def _refuse_long(self) -> None:
        text = f"The request has more than {MAX_HEAD_BYTES} bytes that are no body."
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)

    def _refuse_pipelined(self) -> None:
        self.cycle.keep_alive = False

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer in place of the application, and close."""
        self._stop_watching()
        self.note_refusal()
        body = msgspec.json.encode(error_body(text, "invalid_request_error"))
        self.transport.write(
            b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[status], len(body), body)
        )
        self.transport.close()

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.read_timeout_s, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def connection_kind(
    read_timeout_s: float, note_refusal: Callable[[], None]
) -> type[HttpConnection]:
    """Return the connection that uvicorn is to make, which it gives no arguments of ours.

    `note_refusal` is called for what is refused before it is known to be a call.
    """
    members = {"read_timeout_s": read_timeout_s, "note_refusal": staticmethod(note_refusal)}
    return type("HttpConnection", (HttpConnection,), members)


def _num_bytes(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    """Return about how long a head is, with what parts its lines."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
