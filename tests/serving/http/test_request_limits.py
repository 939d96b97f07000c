"""Limits on the heads, trailers and chunks of requests over HTTP."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from cluster.serving.http.connection import HttpConnection
from cluster.serving.http.request_head import MAX_HEAD_BYTES, MAX_HEADERS
from tests.fakes import wait_for
from tests.serving.http.raw_requests import (
    CHUNKED,
    HOST,
    JSON_HEAD,
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
