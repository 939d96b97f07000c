"""The HTTP server itself: its time limits, its stop, and what it logs."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.engine_client import EngineClient
from cluster.serving.http.connection import HttpConnection
from cluster.serving.http.server import HttpServer
from cluster.serving.http_app import build_http_app
from cluster.serving.servicer import Servicer
from tests.serving.conftest import engine_config
from tests.serving.http.raw_requests import (
    post,
)

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer


def make_server(tokenizer: Tokenizer, read_timeout_s: float) -> HttpServer:
    client = EngineClient(asyncio.get_running_loop())
    servicer = Servicer(client, tokenizer, engine_config())
    app = build_http_app(servicer, read_timeout_s=read_timeout_s)
    return HttpServer(app, host="127.0.0.1", port=0)


@pytest.fixture
async def impatient_server(tokenizer: Tokenizer) -> HttpServer:
    """A server on the event loop of the test, which waits 0.2 s for requests."""
    return make_server(tokenizer, 0.2)


@pytest.fixture
async def patient_server(tokenizer: Tokenizer) -> HttpServer:
    """A server on the event loop of the test."""
    return make_server(tokenizer, 60.0)


async def test_missing_body_times_out(impatient_server: HttpServer) -> None:
    await impatient_server.start_server()
    # The head arrives before the server knows of the connection, so that it is never late.
    connection = socket.create_connection(("127.0.0.1", impatient_server.port))
    connection.sendall(post(b'{"model"', num_declared=100))
    reader, writer = await asyncio.open_connection(sock=connection)
    async with asyncio.timeout(60.0):
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"type":"invalid_request_error"' in received
    writer.close()
    await impatient_server.stop_server()


async def test_body_of_a_request_that_was_answered_is_not_kept(patient_server: HttpServer) -> None:
    await patient_server.start_server()
    reader, writer = await asyncio.open_connection("127.0.0.1", patient_server.port)
    begun = post(b"x" * 50_000, num_declared=60_000).replace(b"/v1/completions", b"/unknown")
    writer.write(begun)
    assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
    assert only_connection(patient_server).cycle.body == b""
    writer.close()
    await patient_server.stop_server()


def only_connection(server: HttpServer) -> HttpConnection:
    """Return the server's end of its only connection."""
    assert server._server is not None
    (connection,) = server._server.server_state.connections
    assert isinstance(connection, HttpConnection)
    return connection


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHo"])
async def test_missing_head_times_out(impatient_server: HttpServer, begun: bytes) -> None:
    await impatient_server.start_server()
    connection = socket.create_connection(("127.0.0.1", impatient_server.port))
    connection.sendall(begun)
    reader, writer = await asyncio.open_connection(sock=connection)
    async with asyncio.timeout(60.0):
        assert await reader.read() == b""
    writer.close()
    await impatient_server.stop_server()


async def test_missing_second_head_times_out(patient_server: HttpServer) -> None:
    await patient_server.start_server()
    reader, writer = await asyncio.open_connection("127.0.0.1", patient_server.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"]}")
    kind = type(only_connection(patient_server))
    kind.options = replace(kind.options, read_timeout_s=0.2)
    writer.write(b"GET /he")
    async with asyncio.timeout(60.0):
        assert await reader.read() == b""
    writer.close()
    await patient_server.stop_server()


async def test_stop_during_a_body_is_quiet_and_quick(
    patient_server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await patient_server.start_server()
    _, writer = await asyncio.open_connection("127.0.0.1", patient_server.port)
    writer.write(post(b'{"model"', num_declared=100))
    await asyncio.sleep(0.05)
    # The server would wait a minute for the body.
    async with asyncio.timeout(30.0):
        await patient_server.stop_server()
    writer.close()
    assert [record.getMessage() for record in caplog.records] == []


async def test_connections_made_while_the_server_stops_do_not_hold_it_up(
    tokenizer: Tokenizer,
) -> None:
    client = EngineClient(asyncio.get_running_loop())
    servicer = Servicer(client, tokenizer, engine_config())
    server = HttpServer(build_http_app(servicer), host="127.0.0.1", port=0)
    await server.start_server()
    running = server._server
    assert running is not None
    make: Any = running.config.http_protocol_class  # Any: typed as a protocol of any kind
    ends: list[socket.socket] = []

    async def keep_connecting() -> None:
        # What was accepted before the stop may be connected at any time after it.
        listener = socket.create_server(("127.0.0.1", 0))
        with listener:
            while True:
                ends.append(socket.create_connection(listener.getsockname()))
                theirs, _ = listener.accept()
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: make(
                        config=running.config, server_state=running.server_state, app_state={}
                    ),
                    theirs,
                )
                await asyncio.sleep(0.005)

    connecting = asyncio.create_task(keep_connecting())
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(server.stop_server())
    # Longer than the grace period, after which connections are aborted.
    await asyncio.sleep(1.5)
    connecting.cancel()
    await asyncio.wait_for(stopping, 60.0)
    for end in ends:
        end.close()


async def test_invalid_requests_are_logged_in_one_line(
    patient_server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    await patient_server.start_server()
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", patient_server.port)
        writer.write(b"GET / HTTP\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
    await patient_server.stop_server()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["Requests that are not valid HTTP: 1, the last one from 127.0.0.1."]
