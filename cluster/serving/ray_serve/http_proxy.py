"""Middleware of Ray Serve's HTTP proxy, which its environment names.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=cluster.serving.ray_serve.http_proxy:middlewares

It chooses the routing key of requests, and sends short bodies with their scope. A stream whose
replica died, hangs or ended it too early continues from another one, and any other request is sent
again; if that fails, the response ends with an OpenAI error. This module does not know the
servicer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.middleware import Middleware

from cluster.serving.continuation import CONTINUATION_KEY
from cluster.serving.ray_serve.carried_body import BODY_KEY
from cluster.serving.ray_serve.proxied_http.body_key import key_of_body
from cluster.serving.ray_serve.proxied_http.headers import decodable_headers
from cluster.serving.ray_serve.proxied_http.request import ProxiedHttpRequest
from cluster.serving.ray_serve.proxied_http.response import ProxiedHttpResponse
from cluster.serving.ray_serve.routing.affinity import Owners, RoutingKey
from cluster.serving.ray_serve.routing.held_call import HeldBytes
from cluster.serving.ray_serve.routing.proxied_call import ProxiedCall

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["SESSION_HEADER", "ReplicaGuard", "middlewares"]

SESSION_HEADER = "x-session-id"
_SESSION_NAME = SESSION_HEADER.encode()
_PROBES = ("/health", "/ready")
"""The ends of paths that are answered soon, even if no replica is available."""


def middlewares() -> list[Middleware]:
    """Return the middleware of Serve's proxy."""
    return [Middleware(ReplicaGuard)]


class ReplicaGuard:
    """Sets the routing key of requests, and completes responses of replicas that failed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held = HeldBytes()
        self._owners = Owners()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = ProxiedCall(self._held, is_probe=scope["path"].endswith(_PROBES))
        try:
            request = ProxiedHttpRequest(receive, call)
            body = await request.short_body(scope)
            scope = {**scope, "headers": self._headers_with_key(scope, body)}
            if body is not None:
                scope[BODY_KEY] = body
            response = ProxiedHttpResponse(scope["path"], send, call, request)
            await self._send_to_replicas(scope, request, response, call)
        finally:
            call.close()

    def _headers_with_key(self, scope: Scope, body: bytes | None) -> list[tuple[bytes, bytes]]:
        """Return the headers for Serve, with the routing key; its text may be the client's."""
        raw = decodable_headers(scope["headers"])
        headers = Headers(raw=raw)
        session = next((text for name, text in raw if name == _SESSION_NAME), b"").decode()
        text = session or (None if body is None else key_of_body(body))
        if not text:
            return raw
        credential = headers.get("authorization") or headers.get("x-api-key")
        key = RoutingKey(text, self._owners.owner_of(credential))
        others = [one for one in raw if one[0] != _SESSION_NAME]
        # In the encoding of Serve: a body may name a session in any script.
        return [*others, (_SESSION_NAME, key.as_session_id().encode())]

    async def _send_to_replicas(
        self,
        scope: Scope,
        request: ProxiedHttpRequest,
        response: ProxiedHttpResponse,
        call: ProxiedCall,
    ) -> None:
        while True:
            # Serve changes the scope that it gets.
            attempt = {**scope, CONTINUATION_KEY: call.continuation()}
            response.begin_attempt()
            try:
                async with call.sending():
                    await self._app(attempt, request.receiver(), response.send)
            except TimeoutError:
                # No replica accepted it.
                break
            cause = response.failure()
            if cause is None or call.is_complete or request.is_disconnected:
                break
            if not call.continues_after(cause):
                break
        await response.finish_response()
