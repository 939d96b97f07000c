"""The middleware of Serve's HTTP proxy, before a replica has the request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.ray_serve.http_proxy import SESSION_HEADER, ReplicaGuard
from cluster.serving.ray_serve.routing import proxied_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp


async def messages_of(
    app: ASGIApp, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> list[Any]:
    """Return the ASGI messages that a client receives."""
    received: list[Any] = []  # Any: ASGI messages

    async def receive() -> Any:  # Any: see above
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:  # Any: see above
        received.append(message)

    raw = [(name.encode(), text.encode()) for name, text in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    await ReplicaGuard(app)(scope, receive, send)
    return received


@pytest.mark.parametrize(
    ("length", "is_read"),
    [("9", True), ("009", True), ("300000", False), ("00000000300000", False)],
)
async def test_only_short_bodies_are_read_for_their_key(length: str, is_read: bool) -> None:
    keys: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        keys.extend(text for name, text in scope["headers"] if name == SESSION_HEADER.encode())
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    body = b'{"prompt": "hello"}'
    await messages_of(app, "POST", "/v1/completions", {"content-length": length}, body)
    assert len(keys) == is_read


async def test_readiness_is_answered_while_no_replica_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxied_call, "_MAX_WAIT_S", 0.05)

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI
        # As Serve waits until a replica is available, and swallows the cancellation.
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    for path in ("/ready", "/app/health"):
        answering = asyncio.create_task(messages_of(app, "GET", path, {}))
        await asyncio.wait((answering,), timeout=10.0)
        assert answering.done()
        start, body = await answering
        assert (start["status"], b"error" in body["body"]) == (503, True)
    # A request may wait.
    waiting = asyncio.create_task(messages_of(app, "GET", "/v1/models", {}))
    await asyncio.wait((waiting,), timeout=0.2)
    assert not waiting.done()
    waiting.cancel()
    await waiting
