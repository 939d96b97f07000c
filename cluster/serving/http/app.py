"""The HTTP application: it routes, authorizes and answers every request.

A request without a key gets 401 for every path, known or not, unless the endpoint's entry makes it
public. Paths are looked up exactly as received, never in a URL built from headers.
"""

from __future__ import annotations

import logging
import math
import secrets
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.serving.auth.tenant import ANONYMOUS, Tenant
from cluster.serving.connections.client_host import client_host
from cluster.serving.continuation import CONTINUATION_KEY
from cluster.serving.http.allowed_origins import AllowedOrigins
from cluster.serving.http.body import declared_length
from cluster.serving.http.connection import IS_FIRST_KEY
from cluster.serving.http.endpoint import Access, Endpoint, json_response
from cluster.serving.http.endpoint_table import EndpointTable
from cluster.serving.http.errors import error_body, rejection_body
from cluster.serving.http.held_bytes import MAX_HEAD_BYTES
from cluster.serving.http.http_call import HttpCall
from cluster.serving.http.kept_response import kept_if_large
from cluster.serving.http.request_head import num_head_bytes
from cluster.serving.http.request_parts import MAX_HEADERS
from cluster.serving.inputs import MAX_CLIENT_ID_LENGTH, Arrival
from cluster.serving.intake.loop_shares import MAX_WAITING, LoopTimer, TooManyWaitError
from pagedray.errors import (
    AuthenticationError,
    EngineError,
    ForbiddenError,
    InternalError,
    OverloadedError,
    PagedRayError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Receive, Scope, Send

    from cluster.serving.calls.open_calls import OpenCall
    from cluster.serving.http.allowed_hosts import AllowedHosts
    from cluster.serving.http.errors import Json
    from cluster.serving.inputs import Operation
    from cluster.serving.intake.read_turns import ReadTurns
    from cluster.serving.servicer import Servicer

__all__ = ["HttpApp"]

logger = logging.getLogger(__name__)

_CLIENT_ERROR = "invalid_request_error"
_MAX_WAITING_BODIES = 256
"""Waiting requests of a client; up to 64 KiB of each body are received."""
_OTHER_S = 0.0002
"""Time to receive a request and to send the response."""
_CONNECTION_S = 0.0003
"""Time to accept a connection and to close it."""
_FREE_CALL_S = 0.001
"""Time of most calls until they are in the engine's queue."""
# The client has disconnected and receives nothing.
_DISCONNECTED_STATUS = 400


class HttpApp:
    """An ASGI application of some endpoints over one servicer."""

    def __init__(
        self,
        servicer: Servicer,
        endpoints: tuple[Endpoint, ...],
        *,
        read_timeout_s: float,
        allowed_hosts: AllowedHosts | None = None,
        allowed_origins: AllowedOrigins | None = None,
    ) -> None:
        """The head of a request, and then its body, must arrive within `read_timeout_s`.

        `allowed_hosts` are checked if no keys are required; None allows all. Web pages of other
        origins than `allowed_origins` cannot read responses.
        """
        self._origins = AllowedOrigins() if allowed_origins is None else allowed_origins
        self.endpoints = endpoints
        self.read_timeout_s = read_timeout_s
        self._servicer = servicer
        self._allowed_hosts = allowed_hosts
        self._table = EndpointTable(endpoints)

    @property
    def write_timeout_s(self) -> float:
        """How long a connection may take to accept sent data."""
        return self._servicer.reader_limits.write_timeout_s

    @property
    def read_turns(self) -> ReadTurns:
        """Decides when data received on connections is handled."""
        return self._servicer.intake.read_turns

    def passes_check(self, path: str, host: str) -> bool:
        """Return whether a health check of a path succeeds for a client that names a host."""
        endpoint = self._table.find(path)[0].get("GET")
        if endpoint is None or endpoint.is_healthy is None:
            return False
        try:
            self._check_host(Headers({"host": host}))
        except HTTPException:
            return False
        return endpoint.is_healthy()

    def count_stalled(self) -> None:
        """Count a client that did not read."""
        self._servicer.metrics.count_stalled_reader("http")

    def note_unreadable(self, status: HTTPStatus, error: str) -> None:
        """Count a request that was rejected before its path was known."""
        self._servicer.metrics.count_outcome("invalid", "http")
        # The connection logs requests that are not valid HTTP.
        if status is not HTTPStatus.BAD_REQUEST:
            self._servicer.rejected_calls.note(
                "http", status=status.value, method="", path="", param=None, error=error
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request = Request(scope, receive)
        response = await self._respond_in_turn(request)
        origin = request.headers.get("origin")
        if origin is not None and self._origins.allows(origin):
            response.headers.update(self._origins.headers_for(origin))
        await response(scope, receive, send)

    async def _respond_in_turn(self, request: Request) -> Response:
        """Return the response once it is its client's turn."""
        endpoint = self._table.find(_path_of(request.scope))[0].get(request.method)
        shares = self._servicer.intake.loop_shares
        client, tenant = self._client_of(request)
        is_public = endpoint is not None and endpoint.access is Access.PUBLIC
        # A health check on a connection of its own never waits.
        may_wait = not (is_public and request.scope.get(IS_FIRST_KEY, True))
        if may_wait:
            most = _MAX_WAITING_BODIES if _has_body(request) else MAX_WAITING
            if shares.num_waiting(client) >= most:
                shares.charge(client, _OTHER_S)
                error = TooManyWaitError(shares.wait_s(client))
                return self._rejection(request, error, {"connection": "close"})
            await shares.wait_turn(client)
        timer = LoopTimer()
        response = await timer.run(self._respond(request))
        if not may_wait:
            # Else the checks of a host, which are not delayed, would delay its other requests.
            return response
        is_first = request.scope.get(IS_FIRST_KEY, False)
        used_s = timer.used_s + (_CONNECTION_S if is_first else 0.0)
        charged_s = _charged_s(endpoint, response, used_s)
        call_s = _OTHER_S + used_s - charged_s
        shares.charge_call(client, tenant, call_s, always_s=charged_s)
        # Earlier time was in other passes.
        self.read_turns.exclude(min(charged_s, timer.last_s))
        return response

    def _client_of(self, request: Request) -> tuple[str, str]:
        """Return the client that takes turns, and its tenant.

        The client is a tenant, or a host without a valid key.
        """
        if self._servicer.authenticator.requires_keys:
            with suppress(AuthenticationError):
                tenant = self._servicer.authenticate(_credential(request)).name
                return f"tenant {tenant}", tenant
        address = request.scope.get("client")
        return client_host(address[0]) if address else "", ANONYMOUS.name

    async def _respond(self, request: Request) -> Response:
        try:
            return await self._dispatch(request)
        except PagedRayError as error:
            return self._rejection(request, error)
        except HTTPException as error:
            body = error_body(error.detail, _CLIENT_ERROR)
            return self._error(request, body, error.status_code, error.headers)
        except ClientDisconnect:
            return Response(status_code=_DISCONNECTED_STATUS)
        except Exception as error:
            logger.error("An HTTP request failed.", exc_info=error)
            return self._rejection(request, InternalError())

    def _rejection(
        self, request: Request, error: PagedRayError, headers: Mapping[str, str] | None = None
    ) -> Response:
        given = dict(headers or {})
        if isinstance(error, OverloadedError | EngineError):
            given["retry-after"] = str(math.ceil(error.retry_after_s))
        if isinstance(error, AuthenticationError):
            given["www-authenticate"] = "Bearer"
        return self._error(request, rejection_body(error), error.http_status, given)

    def _error(
        self, request: Request, body: Json, status: int, headers: Mapping[str, str] | None
    ) -> Response:
        """Return an error, given in the format of OpenAI, as a response of the path's API."""
        path = _path_of(request.scope)
        self._log_rejection(request.method, path, body["error"], status)
        form = self._table.errors_of(path)
        request_id = _id_of(request)
        given = dict(headers or {})
        if form.id_header is not None:
            given[form.id_header] = request_id
        return json_response(form.write(body, status, request_id), status=status, headers=given)

    def _log_rejection(self, method: str, path: str, error: object, status: int) -> None:
        endpoint = self._table.find(path)[0].get(method)
        if endpoint is not None and endpoint.is_healthy is not None:
            # A health check fails every few seconds while the server starts.
            return
        assert isinstance(error, dict)
        self._servicer.rejected_calls.note(
            "http",
            status=status,
            method=method,
            path=path,
            param=error["param"],
            error=error["message"],
        )

    async def _dispatch(self, request: Request) -> Response:
        _check_head(request.scope)
        try:
            self._check_host(request.headers)
        except HTTPException:
            self._servicer.metrics.count_outcome("forbidden", "http")
            raise
        methods, path_value = self._table.find(_path_of(request.scope))
        endpoint = methods.get(request.method)
        if endpoint is None and methods and request.method == "OPTIONS":
            # A browser sends no key with it.
            preflight = self._origins.preflight(request.headers, methods)
            if preflight is not None:
                return preflight
        tenant = self._authorize(request, endpoint)
        if not methods:
            raise HTTPException(404, self._not_found(_path_of(request.scope)))
        if endpoint is None:
            allowed = {"allow": ", ".join(sorted(methods))}
            raise HTTPException(405, f"Method not allowed; use {allowed['allow']}.", allowed)
        if endpoint.operation is None and not endpoint.is_counted:
            return await self._handle(endpoint, self._call(request, tenant, path_value, None))
        continuation = request.scope.get(CONTINUATION_KEY)
        try:
            entered = self._servicer.enter_call(
                tenant,
                uses_engine=endpoint.operation is not None,
                is_continued=continuation is not None and bool(continuation.sequences),
            )
        except OverloadedError as error:
            call = self._call(request, tenant, path_value, None)
            self._servicer.note_rejected(error, _arrival(call, endpoint.operation), "http")
            raise
        try:
            return await self._handle(endpoint, self._call(request, tenant, path_value, entered))
        finally:
            entered.leave()

    def _not_found(self, path: str) -> str:
        """Return the message for a path that does not exist."""
        absent = self._table.absent(path)
        if absent is not None:
            return f"Not found: {absent}"
        near = self._table.near(path)
        return f"Not found: no such endpoint{'.' if near is None else f'; did you mean {near}?'}"

    async def _handle(self, endpoint: Endpoint, call: HttpCall) -> Response:
        response = await endpoint.handler(call)
        return kept_if_large(response, self._servicer.buffers, call.tenant.name)

    def _call(
        self, request: Request, tenant: Tenant, path_value: str, entered: OpenCall | None
    ) -> HttpCall:
        return HttpCall(
            request=request,
            tenant=tenant,
            path_value=path_value,
            metrics=self._servicer.metrics,
            ignored=self._servicer.ignored,
            intake=self._servicer.intake,
            read_timeout_s=self.read_timeout_s,
            entered=entered,
        )

    def _check_host(self, headers: Headers) -> None:
        """Raise HTTPException for a request that another site's page may have caused."""
        # A page does not know the visitor's key.
        if self._allowed_hosts is not None and not self._servicer.authenticator.requires_keys:
            self._allowed_hosts.check(headers)

    def _authorize(self, request: Request, endpoint: Endpoint | None) -> Tenant:
        """Return the tenant of a request. Raises AuthenticationError or ForbiddenError."""
        if endpoint is not None and endpoint.access is Access.PUBLIC:
            return ANONYMOUS
        with self._servicer.metrics.counting_rejections("http"):
            tenant = self._servicer.authenticate(_credential(request))
            if endpoint is not None and endpoint.access is Access.ADMINS and not tenant.is_admin:
                raise ForbiddenError("This endpoint requires the API key of an admin.")
        return tenant


def _credential(request: Request) -> str | None:
    """Return the Authorization header, or the key header of Anthropic's clients.

    Raises AuthenticationError.
    """
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise AuthenticationError("The request has more than one Authorization header.")
    if given:
        return given[0]
    key = request.headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"


def _id_of(request: Request) -> str:
    """Return the client's own id of a request, or a new id."""
    given = request.headers.get("x-request-id", "")
    is_valid = 0 < len(given) <= MAX_CLIENT_ID_LENGTH and given.isprintable()
    return given if is_valid else secrets.token_hex(16)


def _has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or bool(declared_length(request.headers))


def _charged_s(endpoint: Endpoint | None, response: Response, used_s: float) -> float:
    """Return the time of the event loop that a request's client is charged."""
    if endpoint is None or endpoint.operation is None:
        return _OTHER_S + used_s
    if response.status_code == OverloadedError.http_status:
        # An overloaded server rejects at once; clients that it has room for are not delayed
        # unless others wait (`LoopShares.charge_call`).
        return 0.0
    if response.status_code >= 400:
        return _OTHER_S + used_s
    # The engine's queue limits calls, but not the time before a call has its place. Generation is
    # not charged, which a complete response includes.
    is_stream = response.media_type == "text/event-stream"
    return max(0.0, used_s - _FREE_CALL_S) if is_stream else 0.0


def _arrival(call: HttpCall, operation: Operation | None) -> Arrival | None:
    if operation is None:
        return None
    return Arrival(
        operation=operation,
        tenant=call.tenant.name,
        client_id=call.client_id,
        origin=call.origin,
    )


def _check_head(scope: Scope) -> None:
    """Raise HTTPException if a head is too large: Ray Serve's proxy has no limits of its own."""
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HTTPException(431, f"A request may have at most {MAX_HEADERS} headers.")
    url = scope.get("raw_path", b"") + scope.get("query_string", b"")
    if num_head_bytes(url, headers) > MAX_HEAD_BYTES:
        raise HTTPException(431, f"The head of the request exceeds {MAX_HEAD_BYTES} bytes.")


def _path_of(scope: Scope) -> str:
    # The server that mounts the application sets its root path.
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) or "/" if root else path


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
