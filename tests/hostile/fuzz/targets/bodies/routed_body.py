"""Bodies in Ray Serve's HTTP proxy, which derives the routing key from their prompts."""

from __future__ import annotations

import asyncio
import atexit
from typing import TYPE_CHECKING

from cluster.serving.ray_serve.http_proxy import ReplicaGuard
from tests.hostile.fuzz.target import Target

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

_LOOP = asyncio.new_event_loop()
atexit.register(_LOOP.close)


def run(data: bytes) -> None:
    """Pass the body on unchanged, whatever it is, and the response back."""
    assert _LOOP.run_until_complete(_statuses(data)) == [400]


async def _statuses(body: bytes) -> list[int]:
    """Return the statuses of the responses to a body."""
    statuses: list[int] = []

    async def replica(scope: Scope, receive: Receive, send: Send) -> None:
        received = await receive()
        assert received["body"] == body
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-length", b"%d" % len(body))],
    }
    await ReplicaGuard(replica)(scope, receive, send)
    return statuses


TARGET = Target(
    run=run,
    seeds=(
        b'{"model":"m","prompt":"import os"}',
        b'{"prompt":[5,6,7],"n":2}',
        b'{"messages":[{"role":"user","content":"x"}],"prompt":null}',
        b'{"prompt":"\xff"}',
    ),
    words=(b'"prompt":', b'"messages":', b"\\ud800", b"9" * 30, b"1e999", b"[[", b"\xed\xa0\x80"),
    max_bytes=1024,
)
