"""Connections take turns with requests while anyone waits for tokens."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from cluster.serving.connections.connection_limits import ConnectionLimits
from cluster.serving.connections.listener import listen
from cluster.serving.http.acceptor import Acceptor
from cluster.serving.intake.read_turns import ReadTurns
from tests.serving.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CHECK = b"GET /health HTTP/1.1\r\n\r\n"
_QUICK_CHECK = b"GET /ready HTTP/1.1\r\n\r\n"
_OTHER = b"POST /v1/completions HTTP/1.1\r\n\r\n"


class _Opened(asyncio.Protocol):
    """Notes what opened connections receive."""

    def __init__(self, received: list[bytes], note_lost: Callable[[], None]) -> None:
        self._received = received
        self._note_lost = note_lost

    def data_received(self, data: bytes) -> None:
        self._received.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._note_lost()


class _OneTurn(ReadTurns):
    """Has room for accepting a connection, and none for opening it."""

    def __init__(self) -> None:
        super().__init__(has_streams=lambda: True)
        self._num_takes = 0
        self.waiting: list[Callable[[], None]] = []

    def take(self, num_bytes: int = 0) -> bool:
        self._num_takes += 1
        return self._num_takes == 1

    def wait(self, line: str, handle: Callable[[], None], num_bytes: int) -> None:
        self.waiting.append(handle)


def accept_into(
    received: list[bytes],
    turns: ReadTurns,
    limits: ConnectionLimits | None = None,
    have_turns: list[bool] | None = None,
    context: ssl.SSLContext | None = None,
) -> tuple[Acceptor, tuple[str, int]]:
    listener = listen("HTTP", "127.0.0.1", 0)
    address = listener.getsockname()

    def make_protocol(note_lost: Callable[[], None], has_turn: bool) -> _Opened:
        if have_turns is not None:
            have_turns.append(has_turn)
        return _Opened(received, note_lost)

    acceptor = Acceptor(
        listener,
        make_protocol,
        limits=ConnectionLimits() if limits is None else limits,
        read_turns=turns,
        answer_check=lambda begun: b"passed" if begun == _QUICK_CHECK else None,
        context=context,
    )
    return acceptor, address


def connect(stack: ExitStack, address: tuple[str, int], request: bytes) -> socket.socket:
    client = stack.enter_context(socket.create_connection(address, 60.0))
    client.sendall(request)
    return client


async def test_a_health_check_is_opened_before_other_connections_of_its_host() -> None:
    received: list[bytes] = []
    acceptor, address = accept_into(received, ReadTurns(has_streams=lambda: True))
    with ExitStack() as stack:
        for request in (*[_OTHER] * 12, _CHECK):
            connect(stack, address, request)
        async with asyncio.timeout(60.0):
            while len(received) < 13:
                await asyncio.sleep(0)
        assert received.index(_CHECK) < 7
        acceptor.close()
        await acceptor.wait_closed()


async def test_closing_ends_connections_that_wait_to_be_opened() -> None:
    received: list[bytes] = []
    turns = _OneTurn()
    acceptor, address = accept_into(received, turns)
    with ExitStack() as stack:
        client = connect(stack, address, _OTHER)
        client.setblocking(False)
        async with asyncio.timeout(60.0):
            while not turns.waiting:
                await asyncio.sleep(0)
            acceptor.close()
            # The client's data was not read, which resets the connection.
            with pytest.raises(ConnectionResetError):
                await asyncio.get_running_loop().sock_recv(client, 1)
        for handle in turns.waiting:
            handle()
        await acceptor.wait_closed()
        assert not received


async def test_quick_checks_are_answered_while_connections_wait_to_be_opened() -> None:
    received: list[bytes] = []
    acceptor, address = accept_into(received, _OneTurn())
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        connect(stack, address, _OTHER)
        clients = [connect(stack, address, _QUICK_CHECK) for _ in range(3)]
        async with asyncio.timeout(60.0):
            for client in clients:
                client.setblocking(False)
                assert await loop.sock_recv(client, 100) == b"passed"
                assert await loop.sock_recv(client, 100) == b""
        acceptor.close()
        await acceptor.wait_closed()
    assert not received


async def test_a_check_that_arrives_late_is_answered_in_its_turn() -> None:
    received: list[bytes] = []
    turns = _OneTurn()
    acceptor, address = accept_into(received, turns, ConnectionLimits(total=1, per_host=1))
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        client = connect(stack, address, b"")
        client.setblocking(False)
        async with asyncio.timeout(60.0):
            while not turns.waiting:
                await asyncio.sleep(0)
            # The waiting connection counts.
            another = connect(stack, address, _QUICK_CHECK)
            another.setblocking(False)
            acceptor._accept_some()
            with pytest.raises(ConnectionResetError):
                await loop.sock_recv(another, 1)
            client.sendall(_QUICK_CHECK)
            turns.waiting.pop()()
            assert await loop.sock_recv(client, 100) == b"passed"
            # It does not count any longer.
            another = connect(stack, address, _QUICK_CHECK)
            another.setblocking(False)
            acceptor._accept_some()
            assert await loop.sock_recv(another, 100) == b"passed"
        acceptor.close()
        await acceptor.wait_closed()
    assert not received


@pytest.mark.parametrize("late", [b"", _OTHER])
async def test_bytes_that_arrive_before_the_turn_are_read_in_it(late: bytes) -> None:
    received: list[bytes] = []
    have_turns: list[bool] = []
    turns = _OneTurn()
    acceptor, address = accept_into(received, turns, have_turns=have_turns)
    with ExitStack() as stack:
        client = connect(stack, address, b"")
        async with asyncio.timeout(60.0):
            while not turns.waiting:
                await asyncio.sleep(0)
            client.sendall(late)
            turns.waiting.pop()()
            while not have_turns:
                await asyncio.sleep(0)
        assert have_turns == [bool(late)]
        acceptor.close()
        await acceptor.wait_closed()


async def test_connection_whose_handshake_fails_does_not_count(tmp_path: Path) -> None:
    authority = Authority()
    authority.issue().write(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    limits = ConnectionLimits(total=1, per_host=1)
    turns = ReadTurns(has_streams=lambda: False)
    acceptor, address = accept_into([], turns, limits, context=context)
    async with asyncio.timeout(60.0):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(_OTHER)
        assert await reader.read() == b""
        writer.close()
        await acceptor.wait_closed()
        trusting = ssl.create_default_context(cadata=authority.certificate.decode())
        # Raises an OSError if there is no room for it.
        _, writer = await asyncio.open_connection(*address, ssl=trusting)
        writer.close()
        await writer.wait_closed()
    acceptor.close()
    await acceptor.wait_closed()
