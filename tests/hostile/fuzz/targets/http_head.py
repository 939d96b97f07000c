"""Requests of HTTP/1.1 on a connection, in two segments."""

from __future__ import annotations

import asyncio
import atexit
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.server import ServerState

from cluster.serving.http.connection import MAX_HEAD_BYTES, connection_kind
from cluster.serving.intake.read_turns import ReadTurns
from tests.hostile.fuzz.target import Target

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]  # Any: ASGI's values

_NUM_TURNS = 6
_STATUS = b"HTTP/1.1 "


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closed, "written after the connection was closed"
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


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


def _ignore() -> None:
    pass


_LOOP = asyncio.new_event_loop()
atexit.register(_LOOP.close)


def _waits_for_tokens() -> bool:
    return _WAITING[0]


_WAITING = [False]
"""Whether anyone waits for tokens, so that reads take turns."""
_CONFIG = uvicorn.Config(
    _app,
    http=connection_kind(
        5.0,
        5.0,
        note_refusal=_ignore,
        note_stall=_ignore,
        read_turns=ReadTurns(has_streams=_waits_for_tokens),
    ),
    lifespan="off",
    ws="none",
    log_config=None,
    access_log=False,
    server_header=False,
    proxy_headers=False,
)
_CONFIG.load()


async def _serve(segments: tuple[bytes, ...]) -> bytes:
    """Return what the server answers to segments of a connection that then ends."""
    transport = _Transport()
    connection = _CONFIG.http_protocol_class(  # type: ignore[call-arg]  # of both parsers' classes
        config=_CONFIG, server_state=_STATE, app_state={}, _loop=_LOOP
    )
    connection.note_lost = lambda: None  # type: ignore[attr-defined]  # ours
    connection.connection_made(transport)
    for segment in segments:
        if not transport.is_closed:
            connection.data_received(segment)
            # Reads that take turns come in one pass of the loop.
            for _ in range(0 if _WAITING[0] else _NUM_TURNS):
                await asyncio.sleep(0)
    for _ in range(_NUM_TURNS):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    for _ in range(_NUM_TURNS):
        await asyncio.sleep(0)
    assert not _STATE.tasks, "a request of a lost connection goes on"
    assert not _STATE.connections
    return transport.written


_STATE = ServerState()
_ERRORS: list[dict[str, Any]] = []  # Any: what asyncio knows of an error
_LOOP.set_exception_handler(lambda _loop, context: _ERRORS.append(context))


def run(data: bytes) -> None:
    """Answer with whole responses; the first byte selects where the segments meet.

    If it is odd, there may be many, which take turns.
    """
    if not data:
        return
    _WAITING[0] = data[0] % 2 == 1
    place = max(1, len(data) * data[0] // 256)
    segments: tuple[bytes, ...] = (data[1:place], data[place:])
    if _WAITING[0]:
        segments = tuple(data[at : at + place] for at in range(1, len(data), place))
    written = _LOOP.run_until_complete(_serve(segments))
    assert not _ERRORS, _ERRORS
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
