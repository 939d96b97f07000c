"""What a connection may do to the HTTP front, byte by byte."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import TYPE_CHECKING

import pytest

from cluster.serving.engine_client import EngineClient
from cluster.serving.http_server import HttpServer
from cluster.serving.servicer import Servicer
from tests.fakes import wait_for
from tests.serving.conftest import engine_config

if TYPE_CHECKING:
    from cluster.serving.tokenizer import Tokenizer
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine


def post(body: bytes, *, num_declared: int | None = None) -> bytes:
    """Return a request as it goes over the wire."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (num_declared or len(body), body)
    )


def call(*, stream: bool = True, max_tokens: int = 200) -> bytes:
    body = {"model": "tiny", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
    return post(json.dumps({**body, "stream": stream}).encode())


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.fronts.http_port or 0), 5)


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    while chunk := connection.recv(2**16):
        received += chunk
    return received


@pytest.mark.parametrize("is_one_segment", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_no_pipelined_request_runs_on_for_a_client_that_is_gone(
    server: Server,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    is_one_segment: bool,
    stream: bool,
) -> None:
    engine.step_s = 0.01
    with connect(server) as connection:
        if is_one_segment:
            connection.sendall(call(stream=stream) * 3)
        else:
            connection.sendall(call(stream=stream))
            wait_for(lambda: engine.num_sequences)
            connection.sendall(call(stream=stream))
        wait_for(lambda: engine.num_sequences)
        time.sleep(0.05)
    wait_for(lambda: not engine.num_sequences, timeout_s=0.5)
    time.sleep(0.1)
    assert len(engine.log.submitted) == 1
    assert engine.num_sequences == 0
    assert [record.getMessage() for record in caplog.records] == []


def test_pipelined_request_is_left_to_be_sent_again(server: Server, engine: FakeEngine) -> None:
    with connect(server) as connection:
        connection.sendall(call(max_tokens=3) * 2)
        received = read_to_end(connection)
    assert received.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in received
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(engine.log.submitted) == 1


def test_requests_one_after_another_share_a_connection(server: Server) -> None:
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(call(max_tokens=2))
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += connection.recv(2**16)
            assert received.startswith(b"HTTP/1.1 200")


@pytest.fixture
async def slow_server(tokenizer: Tokenizer) -> HttpServer:
    client = EngineClient(asyncio.get_running_loop())
    servicer = Servicer(client, tokenizer, engine_config())
    return HttpServer(servicer, host="127.0.0.1", port=0, read_timeout_s=0.2)


async def test_body_that_does_not_come_is_waited_for_a_while(slow_server: HttpServer) -> None:
    await slow_server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", slow_server.port)
    writer.write(post(b'{"model"', num_declared=100))
    async with asyncio.timeout(2.0):
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"type":"invalid_request_error"' in received
    writer.close()
    await slow_server.stop()


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHo"])
async def test_head_that_does_not_come_is_waited_for_a_while(
    slow_server: HttpServer, begun: bytes
) -> None:
    await slow_server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", slow_server.port)
    writer.write(begun)
    async with asyncio.timeout(2.0):
        assert await reader.read() == b""
    writer.close()
    await slow_server.stop()


async def test_second_head_is_waited_for_no_longer(slow_server: HttpServer) -> None:
    await slow_server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", slow_server.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"]}")
    writer.write(b"GET /he")
    async with asyncio.timeout(2.0):
        assert await reader.read() == b""
    writer.close()
    await slow_server.stop()


async def test_stop_while_a_body_is_half_sent_is_quiet_and_quick(
    slow_server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await slow_server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", slow_server.port)
    writer.write(post(b'{"model"', num_declared=100))
    await asyncio.sleep(0.05)
    started_s = time.monotonic()
    await slow_server.stop()
    assert time.monotonic() - started_s < 10.0
    writer.close()
    assert [record.getMessage() for record in caplog.records] == []
