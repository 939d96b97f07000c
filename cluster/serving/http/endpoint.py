"""An endpoint of the HTTP frontend, who may call it, and one call of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.serving.auth.tenant import Tenant
from cluster.serving.calls.open_calls import OpenCall
from cluster.serving.continuation import CONTINUATION_KEY, Continuation
from cluster.serving.http.body import JSON_TYPE, read_raw
from cluster.serving.http.errors import OPENAI_ERRORS, ErrorShape
from cluster.serving.http.schema import Body, read_body
from cluster.serving.inputs import CallOrigin, Operation
from cluster.serving.intake.intake import Intake
from cluster.serving.telemetry.ignored_parameters import IgnoredParameters
from cluster.serving.telemetry.metrics import Metrics
from pagedray.errors import InvalidRequestError
from pagedray.wording.nearest_name import nearest_name

if TYPE_CHECKING:
    from cluster.serving.intake.limits import RequestSize
    from cluster.serving.intake.steps import Steps

__all__ = ["HEALTHY", "Access", "Endpoint", "EndpointTable", "HttpCall", "json_response"]

HEALTHY = {"status": "ok"}
"""The body of a health check that succeeds."""

_MOST_DIGITS = 18
_LONGEST_LIKE = 64
"""Characters of a path that is compared with all others, which takes time."""
_VERSION = "/v1"

_ABSENT = frozenset(("/v1/responses/compact",))
"""Paths of OpenAI's API that do not exist here, although the parameter of others matches them."""

AnyBody = TypeVar("AnyBody", bound=Body)
Found = TypeVar("Found")
Used = TypeVar("Used")


class Access(Enum):
    """Who may call an endpoint."""

    PUBLIC = "public"
    TENANTS = "tenants"
    ADMINS = "admins"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One authorized call."""

    request: Request
    tenant: Tenant
    rest: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    """A name in braces matches the rest of a path, up to what follows it here."""
    handler: Callable[[HttpCall], Awaitable[Response]] = field(repr=False)
    access: Access = Access.TENANTS
    operation: Operation | None = None
    """The operation of the engine that its calls wait for, if any."""
    errors: ErrorShape = OPENAI_ERRORS
    """The shape of its errors, and of those of paths below its own that do not exist."""
    is_counted: bool = False
    """Whether its calls count toward the limit of open calls; those of an operation always do."""
    is_healthy: Callable[[], bool] | None = field(default=None, repr=False)
    """Whether a health check succeeds, with the body `HEALTHY`; None for other endpoints."""


class EndpointTable:
    """Finds endpoints by the exact path of a request, without normalization.

    HEAD is answered where GET is, unless the path has a parameter: a stream would be resumed.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._open: dict[tuple[str, str], dict[str, Endpoint]] = {}
        """Endpoints whose paths have a parameter, by what precedes it and what follows it."""
        for endpoint in endpoints:
            prefix, brace, rest = endpoint.path.partition("{")
            if brace:
                ends = prefix, rest.partition("}")[2]
                self._open.setdefault(ends, {})[endpoint.method] = endpoint
            else:
                methods = self._exact.setdefault(prefix, {})
                methods[endpoint.method] = endpoint
                if endpoint.method == "GET":
                    # The server leaves the body out.
                    methods["HEAD"] = endpoint
        self._errors_below = {
            f"{one.path}/": one.errors for one in endpoints if one.errors is not OPENAI_ERRORS
        }
        # A path with an end is more specific than one whose parameter is all of the rest.
        self._open = dict(sorted(self._open.items(), key=lambda one: -len(one[0][1])))

    def find(self, path: str) -> tuple[Mapping[str, Endpoint], str]:
        """Return the endpoints of a path by method, and the value of its parameter."""
        found = self._exact.get(path)
        if found is not None:
            return found, ""
        if path in _ABSENT:
            return {}, ""
        for (prefix, suffix), by_method in self._open.items():
            is_longer = len(path) > len(prefix) + len(suffix)
            if is_longer and path.startswith(prefix) and path.endswith(suffix):
                return by_method, path[len(prefix) : len(path) - len(suffix)]
        return {}, ""

    def errors_of(self, path: str) -> ErrorShape:
        """Return the shape of errors of the API that a path belongs to."""
        methods, _ = self.find(path)
        of_path = (one.errors for one in methods.values())
        below = (shape for root, shape in self._errors_below.items() if path.startswith(root))
        return next(of_path, None) or next(below, OPENAI_ERRORS)

    def near(self, path: str) -> str | None:
        """Return the path of an endpoint that a client most likely means; None is none.

        The URL that a client is given may lack the version, or have it twice, or be misspelled.
        """
        bare = path.removeprefix(_VERSION).rstrip("/")
        for one in (_VERSION + bare, bare):
            if one in self._exact:
                return one
        return nearest_name(path, self._exact) if len(path) <= _LONGEST_LIKE else None


def json_response(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response in JSON."""
    return Response(
        msgspec.json.encode(content), status_code=status, headers=headers, media_type=JSON_TYPE
    )
