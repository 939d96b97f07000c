"""Few reads of HTTP connections in a pass of the event loop, while anyone waits for tokens."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING

import httpx

from cluster.serving.intake.read_turns import ReadTurns
from tests.fakes import wait_for
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer

_NUM_CONNECTIONS = 40


async def test_reads_beyond_those_of_a_pass_are_handled_in_later_ones_in_turns() -> None:
    turns = ReadTurns(has_streams=lambda: True)
    assert [turns.take() for _ in range(6)] == [True] * 4 + [False] * 2
    handled: list[str] = []
    for name in ("a1", "a2", "a3", "a4", "b1", "c1"):
        turns.wait(name[0], lambda name=name: handled.append(name), 10)  # type: ignore[misc]  # mypy cannot infer a default
    await asyncio.sleep(0)
    assert handled == ["a1", "b1", "c1", "a2"]
    # Those that wait come first.
    assert not turns.take()
    await asyncio.sleep(0)
    assert handled[4:] == ["a3", "a4"]
    assert [turns.take() for _ in range(3)] == [True, True, False]


async def test_nothing_waits_without_streams_or_if_much_waits() -> None:
    idle = ReadTurns(has_streams=lambda: False)
    assert all(idle.take() for _ in range(100))
    busy = ReadTurns(has_streams=lambda: True)
    while busy.take():
        pass
    busy.wait("a", lambda: None, 2**22 + 1)
    assert busy.take(1)
    # Connections are opened in turn, or their reads would follow.
    assert not busy.take()


async def test_reads_go_on_after_one_has_failed() -> None:
    turns = ReadTurns(has_streams=lambda: True)
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(context["exception"])
    )
    while turns.take():
        pass
    handled: list[int] = []
    error = ValueError("a defect")

    def fail() -> None:
        raise error

    turns.wait("a", fail, 10)
    turns.wait("a", lambda: handled.append(1), 10)
    for _ in range(3):
        await asyncio.sleep(0)
    assert failures == [error]
    assert handled == [1]
    for _ in range(3):
        await asyncio.sleep(0)
    assert turns.take()


def _use_cpu(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


async def test_passes_pause_until_reads_have_had_no_more_than_their_share() -> None:
    turns = ReadTurns(has_streams=lambda: True, share=0.2)
    while turns.take():
        pass
    handled_s: list[float] = []

    def handle() -> None:
        handled_s.append(time.monotonic())
        _use_cpu(0.002)

    for _ in range(5):
        turns.wait("a", handle, 10)
    async with asyncio.timeout(60.0):
        while len(handled_s) < 5:
            await asyncio.sleep(0)
    pauses_s = [after_s - before_s for before_s, after_s in pairwise(handled_s)]
    # Each read takes a whole pass.
    assert min(pauses_s[1:]) > 0.005
    assert handled_s[-1] - handled_s[0] > 0.03


async def test_what_reads_begin_is_counted() -> None:
    # What it begins causes a pause of many seconds.
    turns = ReadTurns(has_streams=lambda: True, share=1e-4)
    loop = asyncio.get_running_loop()
    assert turns.take()
    # As a task that answers, which then closes the connection.
    loop.call_soon(loop.call_soon, _use_cpu, 0.002)
    turns.wait("a", lambda: None, 10)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not turns.take()


async def test_work_with_a_limit_of_its_own_causes_no_pause() -> None:
    turns = ReadTurns(has_streams=lambda: True, share=0.01)
    handled: list[int] = []

    def handle() -> None:
        handled.append(1)
        _use_cpu(0.002)
        turns.exclude(1.0)

    assert turns.take()
    turns.exclude(1.0)
    for _ in range(9):
        turns.wait("a", handle, 10)
    for _ in range(12):
        await asyncio.sleep(0)
    assert len(handled) == 9


def test_health_check_on_its_own_connection_does_not_wait_for_other_requests(
    tokenizer: Tokenizer,
) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with Server(tokenizer) as server, ExitStack() as stack:
        server.engine.most_tokens = 5
        stack.enter_context(
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)
        )
        wait_for(lambda: server.engine.num_sequences)
        turns = server.frontends.servicer.intake.read_turns
        requests = (
            b"POST /unknown HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1000 + b"\r\n\r\n",
        )
        address = ("127.0.0.1", server.frontends.http_port)
        clients = [stack.enter_context(socket.create_connection(address, 60)) for _ in requests]
        assert server.frontends._http is not None
        assert server.frontends._http._server is not None
        connections = server.frontends._http._server.server_state.connections
        wait_for(lambda: len(connections) == 1 + len(clients))
        wait_for(lambda: not turns._is_counting)
        # All reads wait until a pass begins.
        turns._is_counting, turns._num_left = True, 0
        for client, request in zip(clients, requests, strict=True):
            client.sendall(request)
        wait_for(lambda: sum(map(len, turns._waiting.values())) == 3)
        assert {line: len(reads) for line, reads in turns._waiting.items()} == {
            "127.0.0.1": 2,
            "checks of 127.0.0.1": 1,
        }
        server.loop.call_soon_threadsafe(turns._begin_pass)
        statuses = [client.recv(2**16)[9:12] for client in clients]
    assert statuses == [b"404", b"200", b"200"]


def test_connections_that_wait_are_answered_whatever_their_requests_pieces(
    tokenizer: Tokenizer,
) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with Server(tokenizer) as server, ExitStack() as stack:
        server.engine.most_tokens = 5
        stack.enter_context(
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)
        )
        wait_for(lambda: server.engine.num_sequences)
        address = ("127.0.0.1", server.frontends.http_port)
        clients = [
            stack.enter_context(socket.create_connection(address, 60))
            for _ in range(_NUM_CONNECTIONS)
        ]
        with socket.create_connection(address, 60) as leaving:
            for piece in (b"GET /health HTT", b"P/1.1\r\nHost: localhost\r\n\r\n"):
                # All pieces arrive in one pass of the event loop.
                server.loop.call_soon_threadsafe(time.sleep, 0.1)
                for client in (leaving, *clients):
                    client.sendall(piece)
        for client in clients:
            assert client.recv(2**16).startswith(b"HTTP/1.1 200 ")
