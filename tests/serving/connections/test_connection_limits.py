"""Idle connections of one host leave room for others, on both frontends."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.serving.engine_client import EngineClient
from cluster.serving.http.server import HttpServer
from cluster.serving.http_app import build_http_app
from cluster.serving.listener import ConnectionLimits, connection_limits
from cluster.serving.rpc.server import GrpcServer
from cluster.serving.servicer import Servicer
from tests.serving.conftest import engine_config
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.serving.text.tokenizer import Tokenizer

LIMITS = ConnectionLimits(total=8)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.fixture
async def servicer(tokenizer: Tokenizer) -> AsyncIterator[Servicer]:
    client = EngineClient(asyncio.get_running_loop())
    servicer = Servicer(client, tokenizer, engine_config())
    servicer.set_ready()
    yield servicer
    await servicer.close()


async def occupy(stack: ExitStack, port: int, num: int, first: bytes = b"") -> list[socket.socket]:
    """Open idle connections from another host than 127.0.0.1."""
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(num):
        connection = stack.enter_context(socket.socket())
        connection.bind(("127.0.0.2", 0))
        connection.setblocking(False)
        with suppress(OSError):
            await loop.sock_connect(connection, ("127.0.0.1", port))
            connection.send(first)
        connections.append(connection)
    return connections


async def num_alive(connections: list[socket.socket]) -> int:
    """Return how many connections the server has not closed."""
    number = 0
    for connection in connections:
        try:
            while connection.recv(4096):
                pass
        except BlockingIOError:
            number += 1
        except OSError:
            pass
    return number


async def until_alive(connections: list[socket.socket], number: int) -> None:
    async with asyncio.timeout(60.0):
        while await num_alive(connections) != number:
            await asyncio.sleep(0.05)


async def test_http_connections_are_bounded(
    servicer: Servicer, caplog: pytest.LogCaptureFixture
) -> None:
    server = HttpServer(build_http_app(servicer), host="127.0.0.1", port=0, limits=LIMITS)
    await server.start_server()
    try:
        with ExitStack() as stack, caplog.at_level(logging.WARNING):
            connections = await occupy(stack, server.port, 100)
            await until_alive(connections, LIMITS.total)
        assert len(caplog.records) == 1
        # Closed connections no longer count.
        assert server._server is not None
        open_connections = server._server.server_state.connections
        await wait_until(lambda: not open_connections)
        async with httpx.AsyncClient(timeout=60.0) as client:
            url = f"http://127.0.0.1:{server.port}/version"
            assert (await client.get(url)).status_code == 200
    finally:
        await server.stop_server()


async def test_old_grpc_connections_take_no_more_calls_and_keep_theirs(
    servicer: Servicer,
) -> None:
    limits = ConnectionLimits(age_s=0.2)
    server = GrpcServer(servicer, host="127.0.0.1", port=0, limits=limits)
    await server.start_server()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            # Any: the stub is not async to mypy.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(PREFACE)
            async with asyncio.timeout(60.0):
                # The reason that the last frame gives.
                await reader.readuntil(b"max_age")
            writer.close()
            await server.set_serving(True)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await server.stop_server(0.1)


@pytest.mark.parametrize("limit", [64, 256, 1024, 20_000])
def test_descriptors_are_left_for_everything_else(limit: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        limits = connection_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 2 * limits.total <= limit - min(128, limit // 2)
    assert limits.total > 0
