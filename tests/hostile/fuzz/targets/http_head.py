"""Requests of HTTP/1.1 on a connection, in two segments."""

from __future__ import annotations

import asyncio
import atexit
from typing import TYPE_CHECKING, Any

from cluster.serving.http.request_checks import MAX_HEAD_BYTES
from tests.hostile.fuzz.memory_server import MemoryServer
from tests.hostile.fuzz.target import Target

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]  # Any: ASGI's values

_STATUS = b"HTTP/1.1 "


async def _app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Read the body and answer with its length."""
    assert sum(map(len, map(b"".join, scope["headers"]))) <= MAX_HEAD_BYTES
    size, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        has_more = message["more_body"]
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_LOOP = asyncio.new_event_loop()
atexit.register(_LOOP.close)


_SERVER = MemoryServer(_app, _LOOP)


def run(data: bytes) -> None:
    """Answer with whole responses; the first byte selects where the segments meet.

    If it is odd, there may be many, which arrive at once.
    """
    if not data:
        return
    is_at_once = data[0] % 2 == 1
    place = max(1, len(data) * data[0] // 256)
    segments: tuple[bytes, ...] = (data[1:place], data[place:])
    if is_at_once:
        segments = tuple(data[at : at + place] for at in range(1, len(data), place))
    written = _LOOP.run_until_complete(_SERVER.respond(segments, is_at_once=is_at_once))
    assert not written or written.startswith(_STATUS), written[:100]
    assert b" 500 " not in written[: len(_STATUS) + 4], written[:200]


_POST = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

TARGET = Target(
    run=run,
    seeds=(
        b"\x40" + _POST + b"Content-Length: 2\r\n\r\n{}",
        b"\x80" + _POST + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\nT: v\r\n\r\n",
        b"\xf0" + _POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n{}",
        b"\x00GET / HTTP/1.0\r\n\r\n",
        b"\x20GET /%7e HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"\x20CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x11" + _POST + b"Content-Length: 4\r\n\r\n{  }",
        b"\xa0" + 2 * b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ),
    words=(
        *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: ", b"Connection: keep-alive\r\n"),
        *(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n", b"Host: y\r\n", b"\r\n\r\n", b"Upgrade: websocket\r\n"),
        *(
            b"OPTIONS * ",
            b"0\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\t",
            b"\x00",
            b"http://",
        ),
    ),
    max_bytes=1024,
)
