"""One client's HTTP connection: uvicorn's, but strict where uvicorn lets a client hold it.

It serves one request at a time, waits a bounded time for the next head, and notices at any
moment that the client has gone. What a request says is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["HttpConnection", "connection_kind"]


class HttpConnection(H11Protocol):
    """A connection on which requests follow one another.

    A request that comes before the answer to the last is not taken: reading on would be the only
    way to see that the client has gone, and not reading the only way to make it wait. HTTP has
    the client send it again, on another connection.
    """

    read_timeout_s: ClassVar[float]
    """What a request's head may take to arrive."""
    _head_timer: asyncio.TimerHandle | None = None

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
        super().data_received(data)
        if self._is_waiting_for_head:
            self._watch_head()

    def handle_events(self) -> None:
        super().handle_events()
        if not self._is_waiting_for_head:
            self._stop_watching()
        # h11 holds back what came after the request; more of it would hide the end-of-file.
        if self._is_answering and self.conn.trailing_data[0]:
            self._refuse_pipelined()

    def shutdown(self) -> None:
        """Close once the answer is given; a request that is half sent gets none."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.transport.abort()
        else:
            super().shutdown()

    @property
    def _is_waiting_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        """Whether all of a request is there and its answer is not."""
        return not self._is_waiting_for_head and not self.cycle.more_body

    def _refuse_pipelined(self) -> None:
        self.flow.resume_reading()
        self.cycle.keep_alive = False
        headers = self.cycle.default_headers
        if CLOSE_HEADER not in headers:
            self.cycle.default_headers = [*headers, CLOSE_HEADER]

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.read_timeout_s, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def connection_kind(read_timeout_s: float) -> type[HttpConnection]:
    """Return the connection that uvicorn is to make, which it gives no arguments of ours."""
    return type("HttpConnection", (HttpConnection,), {"read_timeout_s": read_timeout_s})
