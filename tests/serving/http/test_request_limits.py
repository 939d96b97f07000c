"""Limits on the heads, trailers and chunks of requests over HTTP."""

from __future__ import annotations

import selectors
import socket
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from cluster.serving.http.connection import HttpConnection
from cluster.serving.http.held_bytes import MAX_HEAD_BYTES
from cluster.serving.http.request_parts import FREE_CHUNKS, MAX_HEADERS, MIN_CHUNK_BYTES
from tests.fakes import wait_for
from tests.serving.http.raw_requests import (
    BODY,
    CHUNKED,
    HOST,
    JSON_HEAD,
    chunked,
    connect,
    read_to_end,
)

if TYPE_CHECKING:
    from tests.serving.conftest import Server


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /health HTTP/1.1\r\n" + HOST + b"A: ",
        b"GET /",
        JSON_HEAD + CHUNKED + b"\r\n1;",
        JSON_HEAD + CHUNKED + b"\r\n1\r\n{\r\n0\r\nA: ",
    ],
    ids=["header", "path", "chunk extension", "trailer"],
)
def test_size_outside_the_body_is_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    num_received = 0
    receive = HttpConnection.data_received

    def counted(self: HttpConnection, data: bytes) -> None:
        nonlocal num_received
        receive(self, data)
        num_received += len(data)

    monkeypatch.setattr(HttpConnection, "data_received", counted)
    with connect(server) as connection:
        connection.sendall(begun)
        num_sent = len(begun)
        answer = b""
        while not answer and num_sent < 2**20:
            connection.sendall(b"a" * 2**13)
            num_sent += 2**13
            # The server has answered by then if it does.
            wait_for(lambda: num_received == num_sent)  # noqa: B023
            connection.setblocking(False)
            with suppress(BlockingIOError):
                answer = connection.recv(2**16)
            connection.setblocking(True)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert num_sent <= 2 * MAX_HEAD_BYTES


def test_complete_head_is_bounded_too(server: Server) -> None:
    long = b"A: %b\r\n" % (b"a" * MAX_HEAD_BYTES)
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + HOST + long + b"\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 431 ")


def test_heads_that_are_not_complete_are_bounded_together(server: Server) -> None:
    begun = b"GET /health HTTP/1.1\r\n" + HOST + b"A: " + b"a" * (MAX_HEAD_BYTES - 1000)
    assert server.frontends._http is not None
    assert server.frontends._http._server is not None
    connections = server.frontends._http._server.server_state.connections
    with ExitStack() as stack:
        answered = stack.enter_context(selectors.DefaultSelector())
        for _ in range(2**24 // len(begun) + 40):
            connection = stack.enter_context(connect(server))
            connection.sendall(begun)
            answered.register(connection, selectors.EVENT_READ)
        ((key, _), *_) = answered.select(60.0)
        rejected = key.fileobj
        assert isinstance(rejected, socket.socket)
        assert rejected.recv(2**16).startswith(b"HTTP/1.1 431 ")
        # Others, whose heads come in one piece, are served meanwhile.
        with connect(server) as other:
            other.sendall(b"GET /health HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n")
            assert read_to_end(other).startswith(b"HTTP/1.1 200 ")
    # What the connections held is free.
    wait_for(lambda: not connections)
    with connect(server) as connection:
        connection.sendall(begun)
        connection.sendall(b"\r\nConnection: close\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("num_more", [0, 1])
def test_number_of_headers_is_bounded(server: Server, num_more: int) -> None:
    # Beside the host.
    others = b"a:\r\n" * (MAX_HEADERS - 2 + num_more)
    with connect(server) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\n" + HOST + others + b"Connection: close\r\n\r\n"
        )
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 431 " if num_more else b"HTTP/1.1 200 ")


def test_number_of_trailers_is_bounded(server: Server) -> None:
    sent = JSON_HEAD + CHUNKED + b"\r\n1\r\n{\r\n0\r\n" + b"a:\r\n" * (MAX_HEADERS + 1)
    with connect(server) as connection:
        connection.sendall(sent)
        assert read_to_end(connection).startswith(b"HTTP/1.1 431 ")


def test_body_may_not_be_in_many_small_chunks(server: Server) -> None:
    with connect(server) as connection:
        # Not many more, since what the server does not read would reset the connection.
        connection.sendall(chunked(b" " * (FREE_CHUNKS + 50), chunk_bytes=1))
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"64 bytes on average" in received


def test_long_body_may_be_in_chunks(server: Server) -> None:
    body = BODY + b" " * (4 * FREE_CHUNKS * MIN_CHUNK_BYTES)
    with connect(server) as connection:
        connection.sendall(chunked(body, chunk_bytes=MIN_CHUNK_BYTES))
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200 ")


def test_short_body_may_be_in_small_chunks(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(chunked(BODY + b" " * (FREE_CHUNKS - len(BODY)), chunk_bytes=1))
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200 ")
