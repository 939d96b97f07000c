"""One authorized call of the HTTP frontend, and how its body is received and parsed."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cluster.serving.auth import Tenant
from cluster.serving.calls.open_calls import OpenCall
from cluster.serving.continuation import CONTINUATION_KEY, Continuation
from cluster.serving.http.body import read_raw
from cluster.serving.inputs import CallOrigin
from cluster.serving.intake import Intake
from cluster.serving.schema.body import Body
from cluster.serving.schema.body_reader import read_body
from cluster.serving.telemetry.log_lines import IgnoredParameters
from cluster.serving.telemetry.metrics import Metrics
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


__all__ = ["HttpCall"]

_MOST_DIGITS = 18

AnyBody = TypeVar("AnyBody", bound=Body)
Found = TypeVar("Found")
Used = TypeVar("Used")


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
            raise InvalidRequestError(
                "Last-Event-ID must be the id of an event, which is a number, or 0.",
                param="Last-Event-ID",
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
                    yield await read_raw(
                        self.request,
                        incoming,
                        max_bytes=self.intake.size.num_bytes,
                        timeout_s=self.read_timeout_s,
                    )
            except HTTPException:
                self.metrics.count_outcome("invalid", "http")
                raise
