"""One authorized call of the HTTP frontend, and how its body is received and parsed."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from cluster.serving.auth import Tenant
from cluster.serving.continuation import CONTINUATION_KEY, Continuation
from cluster.serving.inputs import CallOrigin
from cluster.serving.intake import Intake
from cluster.serving.json_body import Body, read_body
from cluster.serving.open_calls import OpenCall
from cluster.serving.telemetry.log_lines import IgnoredParameters
from cluster.serving.telemetry.metrics import Metrics
from pagedray.errors import invalid_field

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.datastructures import Headers

    from cluster.serving.intake import IncomingMessage

__all__ = ["JSON_TYPE", "HttpCall", "declared_length"]

_MOST_DIGITS = 18
AnyBody = TypeVar("AnyBody", bound=Body)
Found = TypeVar("Found")
Used = TypeVar("Used")

JSON_TYPE = "application/json"
_MAX_DISCARDED_BYTES = 16 * 2**20
_PAUSE_S = 0.03
"""A client that pauses for so long is waiting for the response."""
# The unread rest of a body would be parsed as the next request.
_CLOSE = {"connection": "close"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One authorized call."""

    request: Request
    tenant: Tenant
    path_value: str
    """The value of the path's parameter; empty if it has none."""
    metrics: Metrics
    ignored: IgnoredParameters
    intake: Intake
    read_timeout_s: float
    entered: OpenCall | None
    """The call in its tenant's limits, if its endpoint counts calls."""

    @property
    def client_id(self) -> str | None:
        """The client's own id of the call, from `X-Request-Id`."""
        return self.request.headers.get("x-request-id")

    @property
    def origin(self) -> CallOrigin:
        """The frontend and the trace context of the call."""
        headers = self.request.headers
        return CallOrigin(
            frontend="http",
            traceparent=headers.get("traceparent"),
            tracestate=headers.get("tracestate"),
        )

    @property
    def continuation(self) -> Continuation | None:
        """Keeps the call the same in another replica; from the proxy in front of this replica."""
        return self.request.scope.get(CONTINUATION_KEY)

    @property
    def last_event_number(self) -> int | None:
        """The number of the last event that the client has, if it resumes a stream.

        It is in the header `Last-Event-ID`, or else in `starting_after` of the query. Raises
        InvalidRequestError.
        """
        given = self.request.headers.get("last-event-id")
        if given is None:
            given = self.request.query_params.get("starting_after")
        if given is None:
            return None
        if not (given.isascii() and given.isdecimal() and len(given) <= _MOST_DIGITS):
            raise invalid_field(
                "Last-Event-ID", "must be the id of an event, which is a number, or 0."
            )
        return int(given)

    async def body(self, kind: type[AnyBody], use: Callable[[AnyBody, bytes], Used]) -> Used:
        """Return the result of `use` for the body and its bytes.

        Raises InvalidRequestError, HTTPException, or ClientDisconnect.
        """
        async with self._received() as raw:
            return await self.intake.parse(len(raw), lambda: use(self._read(kind, raw), raw))

    async def body_with(
        self,
        kind: type[AnyBody],
        find: Callable[[AnyBody], Awaitable[Found]],
        use: Callable[[AnyBody, Found], Used],
    ) -> Used:
        """Return the result of `use` for the body and the result of `find`; see `body`."""
        async with self._received() as raw:
            body = await self.intake.parse(len(raw), lambda: self._read(kind, raw))
            found = await find(body)
            return await self.intake.parse(len(raw), lambda: use(body, found))

    def _read(self, kind: type[AnyBody], raw: bytes) -> AnyBody:
        return read_body(kind, raw, self.intake.size, note_ignored=self.ignored.note)

    @asynccontextmanager
    async def _received(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the body, which count as received inside of the block."""
        tenant = self.tenant.name
        with self.metrics.counting_rejections("http"):
            try:
                with self.intake.reception.open_message(tenant) as incoming:
                    raw = await read_raw(
                        self.request,
                        incoming,
                        max_bytes=self.intake.size.num_bytes,
                        timeout_s=self.read_timeout_s,
                    )
                    if self.entered is not None:
                        await self.entered.take_turn()
                        # Its client may have left while it waited.
                        if await self.request.is_disconnected():
                            raise ClientDisconnect
                    yield raw
            except HTTPException:
                self.metrics.count_outcome("invalid", "http")
                raise


def declared_length(headers: Headers) -> int | None:
    """Return the length of the body that a request declares, or None.

    The parsers of other servers, such as Serve's, leave whitespace around it.
    """
    given = headers.get("content-length", "").strip(" \t")
    # Python refuses to read very long integers.
    return int(given.lstrip("0")[:20] or 0) if given.isdecimal() else None


async def read_raw(
    request: Request, incoming: IncomingMessage, *, max_bytes: int, timeout_s: float
) -> bytes:
    """Return the body; its bytes are counted in `incoming`.

    Raises HTTPException if it is too large, too slow or encoded, and OverloadedError if too many
    bytes are being received.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise HTTPException(415, f"Content-Type must be {JSON_TYPE}.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Content-Encoding is not supported.")
    text = f"The body may have at most {max_bytes} bytes (--max-request-kib)."
    too_large = HTTPException(413, text, _CLOSE)
    if (declared_length(request.headers) or 0) > max_bytes:
        await _discard(request.stream())
        raise too_large
    # Reading and discarding share one stream: Starlette has none after the last chunk.
    stream = request.stream()
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in stream:
                await incoming.wait_room(len(chunk))
                if incoming.num_bytes > max_bytes:
                    break
                chunks.append(chunk)
    except TimeoutError as error:
        text = f"The body did not arrive within {timeout_s:g} s (--read-timeout-s)."
        raise HTTPException(408, text, _CLOSE) from error
    if incoming.num_bytes > max_bytes:
        chunks.clear()
        incoming.shrink_to(0)
        await _discard(stream)
        raise too_large
    return b"".join(chunks)


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Read and drop part of a rejected body: a client that is still sending misses the response.

    A client that waits for the response before it sends gets it immediately.
    """
    num_bytes = 0
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_PAUSE_S) as pause:
            async for chunk in stream:
                num_bytes += len(chunk)
                if num_bytes > _MAX_DISCARDED_BYTES:
                    return
                pause.reschedule(asyncio.get_running_loop().time() + _PAUSE_S)
