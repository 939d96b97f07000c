"""Middleware of Ray Serve's HTTP proxy, which its environment names:
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=cluster.serving.ray_serve.http_proxy:middlewares`.

It chooses the routing key of requests, and ends the response of a replica that died with an OpenAI
error. This module does not know the servicer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware

from cluster.serving.ray_serve.affinity import prefix_key
from cluster.serving.ray_serve.errors import ReplicaDiedError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["ReplicaGuard", "middlewares"]

SESSION_HEADER = "x-session-id"
_MOST_READ_BYTES = 256 * 2**10
"""Requests with longer bodies are routed by load alone, since reading them delays others."""


def middlewares() -> list[Middleware]:
    """Return the middleware of Serve's proxy."""
    return [Middleware(ReplicaGuard)]


class ReplicaGuard:
    """Sets the routing key of requests, and completes responses of replicas that died."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        receive = await _with_key(scope, receive)
        response = _GuardedResponse(send)
        await self._app(scope, receive, response.send)
        await response.finish_response()


class _GuardedResponse:
    """A response that ends with an error if its replica dies."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_started = False
        self._has_ended = False
        self._is_stream = False

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self._has_started = True
            kind = MutableHeaders(raw=message["headers"]).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            self._has_ended = not message.get("more_body", False)
        await self._send(message)

    async def finish_response(self) -> None:
        """End a response that Serve left incomplete because its replica died."""
        if self._has_ended:
            return
        if not self._has_started:
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
            await self._send(
                {
                    "type": "http.response.start",
                    "status": ReplicaDiedError.http_status,
                    "headers": headers,
                }
            )
            await self._send({"type": "http.response.body", "body": _error()})
        elif self._is_stream:
            last = b"data: " + _error() + b"\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        # An incomplete JSON response ends with its connection.


class _Prompt(msgspec.Struct):
    """The prompt of a request body."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None


async def _with_key(scope: Scope, receive: Receive) -> Receive:
    """Set the routing key in the request's headers; return a `receive` that repeats the body."""
    headers = MutableHeaders(scope=scope)
    length = headers.get("content-length", "")
    is_short = length.isdecimal() and 0 < int(length[:9]) <= _MOST_READ_BYTES
    if scope["method"] != "POST" or SESSION_HEADER in headers or not is_short:
        return receive
    taken: list[Message] = []
    while True:
        taken.append(await receive())
        if not taken[-1].get("more_body", False):
            break
    key = _key_of(b"".join(message.get("body", b"") for message in taken))
    if key is not None:
        headers[SESSION_HEADER] = key
    taken.reverse()

    async def again() -> Message:
        return taken.pop() if taken else await receive()

    return again


def _key_of(body: bytes) -> str | None:
    try:
        prompt = msgspec.json.decode(body, type=_Prompt)
    except (msgspec.DecodeError, RecursionError):
        # The replica rejects it with the same error as every frontend.
        return None
    return prefix_key(prompt.messages or prompt.prompt or "")


def _error() -> bytes:
    error = ReplicaDiedError()
    body = {"message": str(error), "type": error.openai_type, "param": None, "code": None}
    return msgspec.json.encode({"error": body})
