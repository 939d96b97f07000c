"""Connections to HTTP, of which health checks are answered without being opened."""

from __future__ import annotations

import asyncio
import atexit
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cluster.serving.admin.endpoints import server_endpoints
from cluster.serving.connections.connection_limits import ConnectionLimits
from cluster.serving.engine_client import EngineClient
from cluster.serving.http.acceptor import Acceptor
from cluster.serving.http.allowed_hosts import AllowedHosts
from cluster.serving.http.app import HttpApp
from cluster.serving.http.quick_checks import QuickChecks
from cluster.serving.intake.read_turns import ReadTurns
from cluster.serving.servicer import Servicer
from cluster.serving.text.tokenizer import Tokenizer
from tests.hostile.fuzz.memory_server import MemoryServer
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target
from tests.serving.checkpoint import write_tokenizer
from tests.serving.conftest import engine_config

if TYPE_CHECKING:
    from collections.abc import Callable

_PARAMETER_BYTES = 2
_MAX_ITERATIONS = 64
_HEADERS = ((b"date", b"Thu, 01 Jan 2026 00:00:00 GMT"),)


class _Listener(socket.socket):
    """A socket of this machine, whose clients seem to come from another one.

    Ports would be used up after some ten thousand connections.
    """

    def __init__(self, note_accept: Callable[[], None]) -> None:
        super().__init__(socket.AF_UNIX)
        self._note_accept = note_accept
        # The system chooses a name that is in no folder.
        self.bind("")
        self.listen()
        self.setblocking(False)

    def accept(self) -> tuple[socket.socket, Any]:  # Any: as in the base class
        connection, _ = super().accept()
        self._note_accept()
        return connection, ("10.0.0.7", 1)


class _Opened(asyncio.Protocol):
    """What an opened connection receives."""

    def __init__(self, note_lost: Callable[[], None]) -> None:
        self.received = b""
        self.is_lost = False
        self._note_lost = note_lost

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._note_lost()


class _Server:
    """Accepts connections, and keeps what those receive that it opens."""

    def __init__(self, app: HttpApp) -> None:
        self._has_streams = False
        self._turns = ReadTurns(has_streams=lambda: self._has_streams)
        self._opened: list[_Opened] = []
        self._listener = _Listener(self._take_turns)
        self._checks = QuickChecks(app.passes_check, lambda: list(_HEADERS))

    async def start(self) -> None:
        """Begin to accept connections on the running loop, until the process ends."""
        acceptor = Acceptor(
            self._listener,
            self._open,
            limits=ConnectionLimits(total=1, per_host=1),
            read_turns=self._turns,
            answer_check=self._checks.response_to,
            context=None,
        )
        atexit.register(acceptor.close)

    async def exchange(
        self, segments: tuple[bytes, ...], *, has_streams: bool, is_silent: bool
    ) -> tuple[bytes, bytes]:
        """Return the response without an opened connection, and what an opened one receives.

        If there are streams, the connection is opened when it is its turn. A client that is silent
        sends nothing before it is accepted.
        """
        sent = b"".join(segments)
        self._has_streams = has_streams
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._listener.getsockname())
            client.setblocking(False)
            if is_silent:
                await asyncio.sleep(0)
            for segment in segments:
                with suppress(BrokenPipeError, ConnectionResetError):
                    client.sendall(segment)
                await asyncio.sleep(0)
            response, has_ended = b"", False
            for _ in range(_MAX_ITERATIONS):
                part = _received(client)
                has_ended = part == b""
                response += part or b""
                if has_ended or any(one.received == sent for one in self._opened):
                    break
                await asyncio.sleep(0)
        assert has_ended or self._opened, "neither answered nor opened"
        received = b"".join([one.received for one in self._opened])
        await self._end_opened()
        return response, received

    async def _end_opened(self) -> None:
        for _ in range(_MAX_ITERATIONS):
            if all(one.is_lost for one in self._opened):
                break
            await asyncio.sleep(0)
        assert all(one.is_lost for one in self._opened)
        self._opened.clear()

    def _take_turns(self) -> None:
        while self._has_streams and self._turns.take():
            pass

    def _open(self, note_lost: Callable[[], None], has_turn: bool) -> _Opened:
        del has_turn
        self._opened.append(_Opened(note_lost))
        return self._opened[-1]


def _received(client: socket.socket) -> bytes | None:
    """Return what a client has received, nothing if that was all, None if nothing has come."""
    try:
        return client.recv(2**12)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        # A connection that is closed may have unread bytes.
        return b""


_LOOP = asyncio.new_event_loop()
atexit.register(_LOOP.close)
_FOLDER = scratch_folder()
write_tokenizer(_FOLDER)
_SERVICER = Servicer(EngineClient(_LOOP), Tokenizer.from_folder(_FOLDER), engine_config())
_APP = HttpApp(
    _SERVICER, server_endpoints(_SERVICER), read_timeout_s=5.0, allowed_hosts=AllowedHosts()
)
_FULL = MemoryServer(_APP, _LOOP, ReadTurns(has_streams=lambda: False), _HEADERS)
_SERVER = _Server(_APP)
_LOOP.run_until_complete(_SERVER.start())


def run(data: bytes) -> None:
    """Answer as the full server does, or open a connection that receives everything.

    The first byte says where the segments meet, the second how they arrive.
    """
    if len(data) <= _PARAMETER_BYTES:
        return
    sent = data[_PARAMETER_BYTES:]
    place, manner = len(sent) * data[0] // 256, data[1]
    segments = (sent[:place], sent[place:])
    response, received = _LOOP.run_until_complete(
        _SERVER.exchange(
            segments if manner & 4 else (sent,),
            has_streams=bool(manner & 1),
            is_silent=bool(manner & 2),
        )
    )
    if not response:
        assert received == sent, received
        return
    assert not received, "answered and opened"
    assert response == _LOOP.run_until_complete(_FULL.respond(segments))


_CHECK = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
_PROBE = (
    b"GET /ping HTTP/1.1\r\nHost: 10.0.0.7:8000\r\nUser-Agent: kube-probe/1.34\r\n"
    b"Accept: */*\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n"
)

TARGET = Target(
    run=run,
    seeds=(
        b"\x40\x00" + _CHECK,
        b"\x80\x04" + _CHECK,
        b"\xc0\x01" + _PROBE,
        b"\x20\x03" + _PROBE,
        b"\x80\x05" + _CHECK + _CHECK,
        b"\x10\x07" + _CHECK.replace(b"/health", b"/ready"),
        b"\x80\x03" + _CHECK[:-2],
        b"\x00\x01" + _CHECK.replace(b"127.0.0.1", b"evil.example"),
        b"\x00\x00" + _CHECK.replace(b"close", b"keep-alive"),
    ),
    words=(
        *(b"GET ", b"POST ", b"/health", b"/ready", b"/ping", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"),
        *(b"Host: ", b"localhost", b"[::1]:80", b"Connection: close\r\n", b"Connection: "),
        *(b"User-Agent: ", b"Accept: ", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked"),
        *(b"Origin: null\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"\t", b"\x00", b"?", b"%68", b"\xff"),
    ),
    max_bytes=1100,
)
