"""The HTTP application: it routes, authorizes and answers every request.

A request without a key gets 401 for every path, known or not, unless the endpoint's entry makes it
public. Paths are looked up exactly as received, never in a URL built from headers.
"""

from __future__ import annotations

import logging
import math
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.serving.auth.tenant import ANONYMOUS, Tenant
from cluster.serving.continuation import CONTINUATION_KEY
from cluster.serving.http.allowed_origins import AllowedOrigins
from cluster.serving.http.endpoint import Access, Endpoint, json_response
from cluster.serving.http.endpoint_table import EndpointTable
from cluster.serving.http.errors import error_body, rejection_body
from cluster.serving.http.http_call import HttpCall
from cluster.serving.http.kept_response import kept_if_large
from cluster.serving.http.request_head import check_head
from cluster.serving.inputs import MAX_CLIENT_ID_LENGTH, Arrival
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

    from starlette.datastructures import Headers
    from starlette.types import Receive, Scope, Send

    from cluster.serving.calls.open_calls import OpenCall
    from cluster.serving.http.allowed_hosts import AllowedHosts
    from cluster.serving.http.errors import Json
    from cluster.serving.inputs import Operation
    from cluster.serving.servicer import Servicer

__all__ = ["HttpApp"]

logger = logging.getLogger(__name__)

_CLIENT_ERROR = "invalid_request_error"
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
        response = await self._respond(request)
        origin = request.headers.get("origin")
        if origin is not None and self._origins.allows(origin):
            response.headers.update(self._origins.headers_for(origin))
        await response(scope, receive, send)

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
        if endpoint is not None and endpoint.is_health_check:
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
        try:
            check_head(request.scope)
        except HTTPException:
            self._servicer.metrics.count_outcome("invalid", "http")
            raise
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


def _arrival(call: HttpCall, operation: Operation | None) -> Arrival | None:
    if operation is None:
        return None
    return Arrival(
        operation=operation,
        tenant=call.tenant.name,
        client_id=call.client_id,
        origin=call.origin,
    )


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
