"""One authorized call of the HTTP frontend, and how its body is received and parsed."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from cluster.serving.auth.tenant import Tenant
from cluster.serving.calls.open_calls import OpenCall
from cluster.serving.continuation import CONTINUATION_KEY, Continuation
from cluster.serving.http.body import read_raw
from cluster.serving.inputs import CallOrigin
from cluster.serving.intake.intake import Intake
from cluster.serving.schema.body import Body
from cluster.serving.schema.body_reader import read_body
from cluster.serving.telemetry.ignored_parameters import IgnoredParameters
from cluster.serving.telemetry.metrics import Metrics
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from cluster.serving.intake.limits import RequestSize
    from cluster.serving.intake.steps import Steps

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
        """What keeps the call the same in another replica, from the proxy in front of this one."""
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

    async def body(self, kind: type[AnyBody], use: Callable[[AnyBody, bytes], Steps[Used]]) -> Used:
        """Return what `use` makes of the body and its bytes.

        A long body is read when it is its tenant's turn. Raises InvalidRequestError,
        HTTPException, or ClientDisconnect if the client has disconnected by then.
        """
        size = self.intake.size
        async with self._received() as raw:
            steps = _read(kind, raw, size, use, self.ignored.note)
            return await self._parse(raw, steps)

    async def body_with(
        self,
        kind: type[AnyBody],
        find: Callable[[AnyBody], Awaitable[Found]],
        use: Callable[[AnyBody, Found], Steps[Used]],
    ) -> Used:
        """Return what `use` makes of the body and of what `find` finds for it.

        It is otherwise as `body`.
        """
        size = self.intake.size
        async with self._received() as raw:
            read = read_body(kind, raw, size, note_ignored=self.ignored.note)
            body = await self._parse(raw, read)
            found = await find(body)
            return await self._parse(raw, use(body, found), num_received=0)

    async def in_steps(self, num_bytes: int, steps: Steps[Used]) -> Used:
        """Return the result of steps that handle this many bytes, which were not received."""
        return await self.intake.parsing.run(
            self.tenant.name, num_bytes, steps, check_client=self._check_client, num_received=0
        )

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

    async def _parse(
        self, raw: bytes, steps: Steps[Used], *, num_received: int | None = None
    ) -> Used:
        return await self.intake.parsing.run(
            self.tenant.name,
            len(raw),
            steps,
            check_client=self._check_client,
            num_received=num_received,
        )

    async def _check_client(self) -> None:
        if await self.request.is_disconnected():
            raise ClientDisconnect


def _read(
    kind: type[AnyBody],
    raw: bytes,
    size: RequestSize,
    use: Callable[[AnyBody, bytes], Steps[Used]],
    note_ignored: Callable[[str], None],
) -> Steps[Used]:
    body = yield from read_body(kind, raw, size, note_ignored=note_ignored)
    return (yield from use(body, raw))
