"""Our part in Ray Serve's HTTP proxy, which calls `middlewares` if its environment says so:
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=cluster.serving.ray_serve.http_proxy:middlewares`.

It chooses the key by which requests are routed, and it ends an answer whose replica has died with
an error that clients understand. It knows no servicer.
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
"""A longer body is routed by load alone: reading it here would hold up other requests."""


def middlewares() -> list[Middleware]:
    """Return what Serve is to put around its proxy."""
    return [Middleware(ReplicaGuard)]


class ReplicaGuard:
    """Looks at each request on its way to a replica, and at the answer on its way back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        receive = await _with_key(scope, receive)
        answer = _Answer(send)
        await self._app(scope, receive, answer.send)
        await answer.finish()


class _Answer:
    """An answer that ends in a sentence, whatever becomes of its replica."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_started = False
        self._has_ended = False
        self._is_stream = False

    async def send(self, message: Message) -> None:
        """Hand a part of the answer on."""
        if message["type"] == "http.response.start":
            self._has_started = True
            kind = MutableHeaders(raw=message["headers"]).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            self._has_ended = not message.get("more_body", False)
        await self._send(message)

    async def finish(self) -> None:
        """End what was left without an end; Serve leaves it so when a replica dies."""
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
        # Half an answer in JSON is ended by its connection, as any other half answer is.


class _Prompt(msgspec.Struct):
    """What a body says of its prompt."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None


async def _with_key(scope: Scope, receive: Receive) -> Receive:
    """Put the key of the request into its head; return what gives the body, once more."""
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
        # The replica refuses it, in the words that every frontend has.
        return None
    return prefix_key(prompt.messages or prompt.prompt or "")


def _error() -> bytes:
    error = ReplicaDiedError()
    body = {"message": str(error), "type": error.openai_type, "param": None, "code": None}
    return msgspec.json.encode({"error": body})
