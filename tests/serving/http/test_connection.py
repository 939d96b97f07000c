"""HTTP connections, byte by byte."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

import pytest

from pagedray.errors import OverloadedError
from tests.fakes import wait_for
from tests.serving.http.raw_requests import (
    BODY,
    CHUNKED,
    HOST,
    IN_CHUNKS,
    JSON_HEAD,
    chunked,
    connect,
    post,
    read_to_end,
)

if TYPE_CHECKING:
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine


def call(*, stream: bool = True, max_tokens: int = 200) -> bytes:
    body = {"model": "tiny", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
    return post(json.dumps({**body, "stream": stream}).encode())


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_stops_sending_has_disconnected(
    server: Server, engine: FakeEngine, stream: bool
) -> None:
    engine.is_paused = True
    with connect(server) as connection:
        connection.sendall(call(stream=stream))
        wait_for(lambda: engine.num_sequences)
        connection.shutdown(socket.SHUT_WR)
        assert b"[DONE]" not in read_to_end(connection)
        wait_for(lambda: not engine.num_sequences)


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(BODY).replace(b"Length: %d" % len(BODY), b"Length: \t%d \t" % len(BODY)),
        post(BODY).replace(b"application/json", b"application/json "),
        JSON_HEAD + CHUNKED.replace(b"chunked", b"chunked ") + b"\r\n" + IN_CHUNKS,
    ],
)
def test_blanks_around_the_value_of_a_header_are_not_part_of_it(
    server: Server, request_bytes: bytes
) -> None:
    with connect(server) as connection:
        connection.sendall(request_bytes.replace(b"\r\n", b"\r\nConnection: close \r\n", 1))
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("is_one_segment", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_pipelined_requests_end_with_their_client(
    server: Server,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    is_one_segment: bool,
    stream: bool,
) -> None:
    engine.step_s = 0.05
    with connect(server) as connection:
        if is_one_segment:
            connection.sendall(call(stream=stream) * 3)
        else:
            connection.sendall(call(stream=stream))
            wait_for(lambda: engine.num_sequences)
            connection.sendall(call(stream=stream))
        wait_for(lambda: engine.num_sequences)
        time.sleep(0.05)
        # They do not end by themselves.
        engine.is_paused = True
    wait_for(lambda: not engine.num_sequences)
    time.sleep(0.1)
    assert len(engine.log.submitted) == 1
    assert engine.num_sequences == 0
    assert [record.getMessage() for record in caplog.records] == []


def test_pipelined_request_is_not_served(server: Server, engine: FakeEngine) -> None:
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


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"POST / HTTP/1.1\r\n" + HOST + rest, id=name)
        for name, rest in {
            "length and coding": b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
            "coding and length": CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
            "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
            "list of lengths": b"Content-Length: 5, 5\r\n\r\nhello",
            "signed length": b"Content-Length: +5\r\n\r\nhello",
            "other coding": b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "two codings": b"Transfer-Encoding: gzip\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
            "coding with a tab": b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
            "space before the colon": b"Content-Length : 5\r\n\r\nhello",
            "folded line": b"A: b\r\n Content-Length: 5\r\n\r\nhello",
            "no character": b"A: b\0c\r\n\r\n",
            "bare carriage return": b"A: b\rContent-Length: 5\r\n\r\nhello",
            "bare line feeds": b"A: b\nContent-Length: 5\n\nhello",
            "second host": HOST + b"\r\n",
            "chunk size in C": CHUNKED + b"\r\n0x1\r\na\r\n0\r\n\r\n",
            "chunk size too large": CHUNKED + b"\r\nffffffffffffffffff\r\na",
            "chunk without an end": CHUNKED + b"\r\n1\r\nab\r\n0\r\n\r\n",
        }.items()
    ]
    + [
        pytest.param(sent, id=name)
        for name, sent in {
            "no host": b"GET /health HTTP/1.1\r\n\r\n",
            "HTTP/2": b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n",
            "HTTP/0.9": b"GET /health HTTP/0.9\r\n" + HOST + b"\r\n",
            "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "CONNECT": b"CONNECT x:80 HTTP/1.1\r\n" + HOST + b"\r\n",
            "TLS": b"\x16\x03\x01\x02\x00\x01",
            "path that is no ASCII": b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
        }.items()
    ],
)
def test_ambiguous_request_is_rejected(server: Server, engine: FakeEngine, sent: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert engine.log.submitted == []


def test_request_that_was_answered_gets_no_other_response(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /unknown HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n")
        received = connection.recv(2**16)
        connection.sendall(b"no chunk\r\n")
        received += read_to_end(connection)
    assert received.count(b"HTTP/1.1 ") == 1
    assert received.startswith(b"HTTP/1.1 404 ")


def test_body_in_chunks_is_read_and_its_trailers_are_not(server: Server) -> None:
    trailers = b"x-request-id: from-a-trailer\r\n\r\n"
    sent = JSON_HEAD + CHUNKED + b"\r\n" + IN_CHUNKS.removesuffix(b"\r\n") + trailers
    with connect(server) as connection:
        connection.sendall(sent + b"GET /health HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n")
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"from-a-trailer" not in received


def test_header_without_a_value_hides_no_other(server: Server) -> None:
    sent = b"POST /v1/completions HTTP/1.1\r\nA:\r\nContent-Type: application/json\r\n" + HOST
    with connect(server) as connection:
        connection.sendall(sent + b"B: \r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY))
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("num_parts", [1, 3])
def test_upgrade_to_another_protocol_is_ignored(server: Server, num_parts: int) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    sent = JSON_HEAD + offer + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    step = -(-len(sent) // num_parts)
    with connect(server) as connection:
        for _ in range(2):
            for begin in range(0, len(sent), step):
                connection.sendall(sent[begin : begin + step])
                time.sleep(0.01)
            received = b""
            # The head may come before the body, whose end is a brace.
            while not received.endswith(b"}"):
                received += connection.recv(2**16)
            assert received.startswith(b"HTTP/1.1 200")


def test_expect_100_continue_is_answered(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(
            JSON_HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        )
        assert connection.recv(2**16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")


def test_body_without_100_continue_is_not_parsed_as_a_request(
    server: Server, engine: FakeEngine
) -> None:
    engine.rejection = OverloadedError("The queue is full.")
    with connect(server) as connection:
        connection.sendall(JSON_HEAD + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 429")
    assert b"connection: close" in received


CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n"


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked", b"identity", b"gzip, chunked"])
def test_transfer_encoding_of_http_1_0_is_rejected(
    server: Server, engine: FakeEngine, coding: bytes
) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
    head = (
        b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n"
        b"Content-Type: application/json\r\nTransfer-Encoding: %b\r\n\r\n" % coding
    )
    with connect(server) as connection:
        connection.sendall(head + CHUNKS % (len(body), body))
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert engine.log.submitted == []


def test_http_1_0_with_a_length_is_served(server: Server, engine: FakeEngine) -> None:
    with connect(server) as connection:
        connection.sendall(call(stream=False, max_tokens=2).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_stream_over_http_1_0_ends_with_its_connection(server: Server, engine: FakeEngine) -> None:
    with connect(server) as connection:
        connection.sendall(call(max_tokens=8).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    *events, last = body.decode().split("\n\n")
    assert last == ""
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("num_bytes", "chunk_bytes", "status"), [(306, 1, 400), (256, 1, 200), (65_536, 64, 200)]
)
def test_chunks_of_a_long_body_may_not_be_small(
    server: Server, num_bytes: int, chunk_bytes: int, status: int
) -> None:
    with connect(server) as connection:
        # Not many more, since what the server does not read would reset the connection.
        connection.sendall(chunked(BODY.ljust(num_bytes), chunk_bytes=chunk_bytes))
        received = connection.recv(2**16)
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert (b"64 bytes on average" in received) == (status == 400)
