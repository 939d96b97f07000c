"""Every rejected call is counted, wherever it is rejected."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import grpc
import pytest

if TYPE_CHECKING:
    import httpx

    from tests.serving.conftest import Server

NO_HTTP = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nA: %b\r\n\r\n" % (b"a" * 2**17),
)
JSON = {"content-type": "application/json"}


def num_invalid(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    found = [
        line
        for line in lines
        if line.startswith("pagedray_requests_total{") and 'outcome="invalid"' in line
    ]
    return sum(float(line.split()[-1]) for line in found)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{", JSON),
        (b'{"model": "tiny", "prompt": "x", "frobnicate": 1}', JSON),
        (b'{"model": "tiny", "prompt": 5}', JSON),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": 0}', JSON),
        (b"{}", {"content-type": "text/plain"}),
        (b" " * (5 * 2**20), JSON),
    ],
    ids=["no JSON", "unknown field", "prompt of no kind", "out of range", "no JSON type", "large"],
)
def test_call_that_http_rejects_is_counted(
    http: httpx.Client, body: bytes, headers: dict[str, str]
) -> None:
    before = num_invalid(http)
    assert http.post("/v1/completions", content=body, headers=headers).is_client_error
    assert num_invalid(http) == before + 1


@pytest.mark.parametrize(
    "message",
    [b"\xff", b"\xf8\x07\x01", b"\xff" * (3 * 2**19)],
    ids=["no message", "unknown field", "large"],
)
@pytest.mark.parametrize("method", ["Generate", "Embed", "Tokenize"])
def test_call_that_grpc_rejects_is_counted(
    http: httpx.Client, server: Server, method: str, message: bytes
) -> None:
    before = num_invalid(http)
    with grpc.insecure_channel(server.grpc_target) as channel:
        generate = channel.unary_stream(
            f"/pagedray.v1.GenerationService/{method}",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        with pytest.raises(grpc.RpcError) as rejected:
            list(generate(message))
    assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert num_invalid(http) == before + 1


@pytest.mark.parametrize("sent", NO_HTTP, ids=["no host", "long head"])
def test_malformed_request_is_counted(http: httpx.Client, server: Server, sent: bytes) -> None:
    before = num_invalid(http)
    with socket.create_connection(("127.0.0.1", server.frontends.http_port or 0), 60) as connection:
        connection.sendall(sent)
        assert connection.recv(2**12).startswith(b"HTTP/1.1 4")
    assert num_invalid(http) == before + 1
