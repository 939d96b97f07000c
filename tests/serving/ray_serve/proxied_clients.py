"""Clients of Serve's proxies, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.serving.ray_serve.failing_replicas import FailingReplicas

__all__ = ["Context", "over_grpc", "over_http", "over_unary"]


class Context:
    """A gRPC call of a client, and what it receives."""

    def __init__(self, body: object, note_write: Callable[[], None] = lambda: None) -> None:
        self._body = body
        self._note_write = note_write
        self.written: list[bytes] = []
        self.code = grpc.StatusCode.OK
        self.details = ""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        return None

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, trailing: object) -> None:
        return None

    async def read(self) -> object:
        return self._body

    async def write(self, message: bytes) -> None:
        self.written.append(message)
        self._note_write()

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object) -> None:
        self.code, self.details = code, details
        raise grpc.aio.AbortError


async def over_grpc(
    serve: FailingReplicas,
    method: str,
    request: Any,  # Any: messages
    note_write: Callable[[], None] = lambda: None,
) -> Context:
    """Make a call whose response is a stream, and return what the client receives."""
    context = Context(request.SerializeToString(), note_write)
    with contextlib.suppress(grpc.aio.AbortError):
        await serve.grpc(method)(None, context)
    return context


async def over_http(
    serve: FailingReplicas,
    path: str,
    body: Mapping[str, object],
    *,
    method: str = "POST",
    is_whole: bool = True,
) -> list[Any]:
    """Return the ASGI messages that a client receives.

    A body that is not whole never ends.
    """
    raw = json.dumps(body).encode()
    incoming = [{"type": "http.request", "body": raw, "more_body": not is_whole}]
    received: list[Any] = []  # Any: ASGI messages

    async def receive() -> Any:  # Any: see above
        if incoming:
            return incoming.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:  # Any: see above
        received.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(raw)).encode()),
        ],
    }
    await serve.http(scope, receive, send)
    return received


# Any: a message.
async def over_unary(serve: FailingReplicas, method: str, request: Any) -> bytes:
    """Return the response to a call without a stream."""
    context = Context(request.SerializeToString())
    await serve.grpc(method)(None, context)
    (answer,) = context.written
    return answer
