"""The HTTP frontend: every request is let in, found, answered, or refused here.

Whoever is not known is told nothing: an endpoint answers those without a key only if its own entry
says so, and what is looked up is the path as it came, never a URL that is put together of headers.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.serving.auth.tenant import ANONYMOUS, Tenant
from cluster.serving.http.endpoint import Access, Endpoint, EndpointTable, HttpCall, json_response
from cluster.serving.http.errors import error_body, refusal_body
from cluster.serving.inputs import Arrival
from pagedray.errors import (
    AuthenticationError,
    ForbiddenError,
    InternalError,
    OverloadedError,
    PagedRayError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Receive, Scope, Send

    from cluster.serving.inputs import Operation
    from cluster.serving.servicer import Servicer

__all__ = ["READ_TIMEOUT_S", "HttpApp"]

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 30.0
"""What the head of a request, and then its body, may take to arrive."""
_CLIENT_ERROR = "invalid_request_error"
# The client has gone; what is returned reaches no one.
_NOBODYS_STATUS = 400


class HttpApp:
    """An ASGI application of some endpoints over one servicer."""

    def __init__(
        self, servicer: Servicer, endpoints: tuple[Endpoint, ...], *, read_timeout_s: float
    ) -> None:
        """A body must arrive within `read_timeout_s`."""
        self.endpoints = endpoints
        self.read_timeout_s = read_timeout_s
        self._servicer = servicer
        self._table = EndpointTable(endpoints)

    def count_unreadable(self) -> None:
        """Count a request that was refused before its path was known."""
        self._servicer.metrics.count_outcome("invalid", "http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._answer_known(request)
        except PagedRayError as error:
            return _refusal(error)
        except HTTPException as error:
            return _error(error.status_code, error.detail, _CLIENT_ERROR, error.headers)
        except ClientDisconnect:
            return Response(status_code=_NOBODYS_STATUS)
        except Exception as error:
            logger.error("An HTTP request failed.", exc_info=error)
            return _refusal(InternalError())

    async def _answer_known(self, request: Request) -> Response:
        methods, rest = self._table.find(_path_of(request.scope))
        endpoint = methods.get(request.method)
        tenant = self._authorize(request, endpoint)
        if not methods:
            raise HTTPException(404, "There is no such endpoint.")
        if endpoint is None:
            allowed = {"allow": ", ".join(sorted(methods))}
            raise HTTPException(405, "The endpoint has no such method.", allowed)
        call = HttpCall(
            request=request,
            tenant=tenant,
            rest=rest,
            metrics=self._servicer.metrics,
            read_timeout_s=self.read_timeout_s,
        )
        if endpoint.operation is not None:
            self._check_room(call, endpoint.operation)
        return await endpoint.handler(call)

    def _check_room(self, call: HttpCall, operation: Operation) -> None:
        """Raise OverloadedError if the call could not wait, before its body is looked at."""
        arrival = Arrival(
            operation=operation,
            tenant=call.tenant.name,
            client_id=call.client_id,
            origin=call.origin,
        )
        self._servicer.check_room(arrival)

    def _authorize(self, request: Request, endpoint: Endpoint | None) -> Tenant:
        """Return whose request it is. Raises AuthenticationError or ForbiddenError."""
        if endpoint is not None and endpoint.access is Access.EVERYBODY:
            return ANONYMOUS
        with self._servicer.metrics.counting_refusals("http"):
            given = request.headers.getlist("authorization")
            if len(given) > 1:
                raise AuthenticationError("The request has two Authorization headers.")
            tenant = self._servicer.authenticate(given[0] if given else None)
            if endpoint is not None and endpoint.access is Access.ADMINS and not tenant.is_admin:
                raise ForbiddenError("The endpoint needs the key of an admin.")
        return tenant


def _path_of(scope: Scope) -> str:
    # Where the application is mounted is said by the server it runs in.
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
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return json_response(refusal_body(error), status=error.http_status, headers=headers)


def _error(status: int, text: str, kind: str, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(error_body(text, kind), status=status, headers=headers)
