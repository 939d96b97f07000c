"""The HTTP application: it routes, authorizes and answers every request.

A request without a key gets 401 for every path, known or not, unless the endpoint's entry makes it
public. Paths are looked up exactly as received, never in a URL built from headers.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.serving.auth.tenant import ANONYMOUS, Tenant
from cluster.serving.continuation import CONTINUATION_KEY
from cluster.serving.http.endpoint import Access, Endpoint, EndpointTable, HttpCall, json_response
from cluster.serving.http.errors import error_body, refusal_body
from cluster.serving.inputs import Arrival
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

    from cluster.serving.http.allowed_hosts import AllowedHosts
    from cluster.serving.inputs import Operation
    from cluster.serving.open_calls import OpenCall
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
    ) -> None:
        """The head of a request, and then its body, must arrive within `read_timeout_s`.

        `allowed_hosts` are checked if no keys are required; None allows all.
        """
        self.endpoints = endpoints
        self.read_timeout_s = read_timeout_s
        self._servicer = servicer
        self._allowed_hosts = allowed_hosts
        self._table = EndpointTable(endpoints)

    @property
    def write_timeout_s(self) -> float:
        """How long a connection may take to accept what is sent."""
        return self._servicer.reader_limits.write_timeout_s

    def count_stalled(self) -> None:
        """Count a client that did not read."""
        self._servicer.metrics.count_stalled_reader("http")

    def count_unreadable(self) -> None:
        """Count a request that was rejected before its path was known."""
        self._servicer.metrics.count_outcome("invalid", "http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        response = await self._respond(Request(scope, receive))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        try:
            return await self._dispatch(request)
        except PagedRayError as error:
            return _refusal(error)
        except HTTPException as error:
            return _error(error.status_code, error.detail, _CLIENT_ERROR, error.headers)
        except ClientDisconnect:
            return Response(status_code=_DISCONNECTED_STATUS)
        except Exception as error:
            logger.error("An HTTP request failed.", exc_info=error)
            return _refusal(InternalError())

    async def _dispatch(self, request: Request) -> Response:
        self._check_host(request)
        methods, rest = self._table.find(_path_of(request.scope))
        endpoint = methods.get(request.method)
        tenant = self._authorize(request, endpoint)
        if not methods:
            raise HTTPException(404, "Not found: no such endpoint.")
        if endpoint is None:
            allowed = {"allow": ", ".join(sorted(methods))}
            raise HTTPException(405, f"Method not allowed; use {allowed['allow']}.", allowed)
        if endpoint.operation is None and not endpoint.is_counted:
            return await endpoint.handler(self._call(request, tenant, rest, None))
        continuation = request.scope.get(CONTINUATION_KEY)
        try:
            entered = self._servicer.enter_call(
                tenant,
                uses_engine=endpoint.operation is not None,
                is_continued=continuation is not None and bool(continuation.sequences),
            )
        except OverloadedError as error:
            call = self._call(request, tenant, rest, None)
            self._servicer.note_refused(error, _arrival(call, endpoint.operation), "http")
            raise
        try:
            return await endpoint.handler(self._call(request, tenant, rest, entered))
        finally:
            entered.leave()

    def _call(
        self, request: Request, tenant: Tenant, rest: str, entered: OpenCall | None
    ) -> HttpCall:
        return HttpCall(
            request=request,
            tenant=tenant,
            rest=rest,
            metrics=self._servicer.metrics,
            intake=self._servicer.intake,
            read_timeout_s=self.read_timeout_s,
            entered=entered,
        )

    def _check_host(self, request: Request) -> None:
        """Raise HTTPException for a request that another site's page may have caused."""
        # A page does not know the visitor's key.
        if self._allowed_hosts is None or self._servicer.authenticator.requires_keys:
            return
        try:
            self._allowed_hosts.check(request.headers)
        except HTTPException:
            self._servicer.metrics.count_outcome("forbidden", "http")
            raise

    def _authorize(self, request: Request, endpoint: Endpoint | None) -> Tenant:
        """Return the tenant of a request. Raises AuthenticationError or ForbiddenError."""
        if endpoint is not None and endpoint.access is Access.PUBLIC:
            return ANONYMOUS
        with self._servicer.metrics.counting_refusals("http"):
            given = request.headers.getlist("authorization")
            if len(given) > 1:
                raise AuthenticationError("The request has more than one Authorization header.")
            tenant = self._servicer.authenticate(given[0] if given else None)
            if endpoint is not None and endpoint.access is Access.ADMINS and not tenant.is_admin:
                raise ForbiddenError("This endpoint requires the API key of an admin.")
        return tenant


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


def _refusal(error: PagedRayError) -> Response:
    headers = {}
    if isinstance(error, OverloadedError | EngineError):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return json_response(refusal_body(error), status=error.http_status, headers=headers)


def _error(status: int, text: str, kind: str, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(error_body(text, kind), status=status, headers=headers)
