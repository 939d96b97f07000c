"""Clients that stop reading, on real connections."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from starlette.responses import Response

from cluster.serving.auth import ANONYMOUS
from cluster.serving.engine_client import EngineClient
from cluster.serving.http.app import HttpApp
from cluster.serving.http.endpoint import Access, Endpoint
from cluster.serving.http.server import HttpServer
from cluster.serving.inputs import CallOptions
from cluster.serving.intake import BufferLimits, ReaderLimits
from cluster.serving.servicer import Servicer
from cluster.serving.tls import certificate_store
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.serving.certificates import Authority
from tests.serving.conftest import Server, engine_config, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.serving.tls import CertificateStore

MANY_TOKENS = 900_000
SEQUENCES = 64
# The client's window does not grow.
CHANNEL_OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16))
WRITE_TIMEOUT_S = 0.5
PATIENCE_S = 60.0


def serving(
    tokenizer: Tokenizer, limits: ReaderLimits, *, certificates: CertificateStore | None = None
) -> Server:
    return Server(tokenizer, context=2**20, reader_limits=limits, certificates=certificates)


@pytest.fixture(scope="module")
def impatient(tokenizer: Tokenizer) -> Iterator[Server]:
    """A server that waits half a second for its readers."""
    with serving(tokenizer, ReaderLimits(write_timeout_s=WRITE_TIMEOUT_S)) as server:
        yield server


# Any: fields of the body
def opened(
    server: Server, *, stream: bool, context: ssl.SSLContext | None = None, **fields: Any
) -> socket.socket:
    """Return the connection of a call that generates much, with a small window."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.frontends.http_port))
    if context is not None:
        connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
    body = json.dumps(
        {
            "model": "tiny", "prompt": "x", "n": SEQUENCES, "max_tokens": MANY_TOKENS,
            "ignore_eos": True, "stream": stream, **fields,
        }
    ).encode()  # fmt: skip
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    return connection


def is_reset(connection: socket.socket) -> bool:
    """Read to the end; return whether the server reset the connection."""
    try:
        while connection.recv(2**20):
            pass
    except ConnectionResetError:
        return True
    return False


def num_stalled(server: Server, frontend: str) -> float:
    found = server.frontends.servicer.metrics.registry.get_sample_value(
        "pagedray_stalled_readers_total", {"frontend": frontend}
    )
    assert found is not None
    return found


def is_idle(server: Server) -> bool:
    servicer = server.frontends.servicer
    return not (servicer.num_open_calls or server.engine.num_sequences)


def message() -> pb.GenerateRequest:
    sampling = pb.SamplingParams(n=SEQUENCES, max_tokens=MANY_TOKENS, ignore_eos=True)
    return pb.GenerateRequest(text="x", sampling=sampling)


def test_http_reader_that_stops_is_disconnected(impatient: Server) -> None:
    before = num_stalled(impatient, "http")
    with opened(impatient, stream=True) as connection:
        wait_for(lambda: impatient.engine.num_sequences)
        wait_for(lambda: is_idle(impatient), timeout_s=PATIENCE_S)
        assert num_stalled(impatient, "http") == before + 1
        assert impatient.frontends.servicer.buffers.num_bytes == 0
        assert is_reset(connection)


def test_http_reader_of_a_few_bytes_at_a_time_is_disconnected(impatient: Server) -> None:
    before = num_stalled(impatient, "http")
    with opened(impatient, stream=True) as connection:
        wait_for(lambda: impatient.engine.num_sequences)
        while not is_idle(impatient):
            assert connection.recv(1)
            time.sleep(0.01)
        assert is_reset(connection)
    assert num_stalled(impatient, "http") == before + 1


def test_complete_response_counts_until_it_is_sent(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, ReaderLimits()) as server:
        buffers = server.frontends.servicer.buffers
        with opened(server, stream=False, max_tokens=300, logprobs=20):
            # While it is collected. The system may take all of it, though the client reads nothing.
            wait_for(lambda: buffers.num_bytes > 2**20, timeout_s=PATIENCE_S)
        wait_for(lambda: not buffers.num_bytes, timeout_s=PATIENCE_S)


def test_complete_response_is_whole_however_large(impatient: Server) -> None:
    fields = {"model": "tiny", "prompt": "x", "n": 16, "max_tokens": 2000, "ignore_eos": True}
    answer = httpx.post(f"{impatient.url}/v1/completions", json=fields, timeout=PATIENCE_S).json()
    assert [one["index"] for one in answer["choices"]] == list(range(16))
    assert answer["usage"]["completion_tokens"] == 16 * 2000
    assert len(json.dumps(answer)) > 2**16
    assert impatient.frontends.servicer.buffers.num_bytes == 0


def test_no_call_starts_while_its_tenant_has_too_much_unread_output(tokenizer: Tokenizer) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    with serving(tokenizer, ReaderLimits(unread_buffer=BufferLimits(2**20))) as server:
        unread = server.frontends.servicer.buffers.open_buffer(ANONYMOUS.name)
        unread.hold(2**18)
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 429
        assert "read or abort the open streams first" in answer.json()["error"]["message"]
        assert not server.engine.log.submitted
        unread.clear()
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "n": 16, "max_tokens": 12000, "ignore_eos": True}),
        ("/tokenize", {"prompt": "x y " * 2**16}),
    ],
)
# Any: fields of the body
def test_response_larger_than_the_memory_of_a_tenant_is_rejected(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    with serving(tokenizer, ReaderLimits(unread_buffer=BufferLimits(2**20))) as server:
        url = f"{server.url}{path}"
        answer = httpx.post(url, json={"model": "tiny", **body}, timeout=PATIENCE_S)
        assert answer.status_code == 400
        assert "The response exceeds 262144 bytes" in answer.json()["error"]["message"]
        wait_for(lambda: is_idle(server), timeout_s=PATIENCE_S)
        assert server.frontends.servicer.buffers.num_bytes == 0


async def test_complete_response_that_is_not_read_is_disconnected(tokenizer: Tokenizer) -> None:
    async def big(call: HttpCall) -> Response:
        return Response(b"x" * 2**25)

    client = EngineClient(asyncio.get_running_loop())
    limits = ReaderLimits(write_timeout_s=WRITE_TIMEOUT_S)
    servicer = Servicer(client, tokenizer, engine_config(), CallOptions(reader_limits=limits))
    endpoint = Endpoint(method="GET", path="/big", handler=big, access=Access.PUBLIC)
    app = HttpApp(servicer, (endpoint,), read_timeout_s=60.0)
    server = HttpServer(app, host="127.0.0.1", port=0)
    await server.start_server()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stalls = servicer.metrics.registry.get_sample_value
        labels = {"frontend": "http"}
        await wait_until(lambda: stalls("pagedray_stalled_readers_total", labels) == 1)
        await asyncio.sleep(0)
        assert is_reset(connection)
    await server.stop_server()
    await servicer.close()


async def test_invalid_request_of_a_client_that_does_not_read_is_disconnected(
    tokenizer: Tokenizer,
) -> None:
    num_answers = 0

    async def small(call: HttpCall) -> Response:
        nonlocal num_answers
        num_answers += 1
        return Response(b"x" * 2**14)

    client = EngineClient(asyncio.get_running_loop())
    limits = ReaderLimits(write_timeout_s=WRITE_TIMEOUT_S)
    servicer = Servicer(client, tokenizer, engine_config(), CallOptions(reader_limits=limits))
    endpoint = Endpoint(method="GET", path="/small", handler=small, access=Access.PUBLIC)
    server = HttpServer(
        HttpApp(servicer, (endpoint,), read_timeout_s=60.0), host="127.0.0.1", port=0
    )
    await server.start_server()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        # Complete responses fill the buffers, but the last rest is too short to pause writing.
        number = 0
        while not num_unsent(server):
            connection.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n")
            number += 1
            await wait_until(lambda: num_answers == number)  # noqa: B023
            await asyncio.sleep(0)
        connection.sendall(b"not HTTP\r\n\r\n")
        await wait_until(lambda: num_unsent(server) is None)
        assert is_reset(connection)
    await server.stop_server()
    await servicer.close()


def num_unsent(server: HttpServer) -> int | None:
    """Return the bytes that wait for the client; None if it is disconnected."""
    assert server._server is not None
    for connection in server._server.server_state.connections:
        size: int = connection.transport.get_write_buffer_size()
        return size
    return None


def test_tls_reader_that_stops_is_disconnected(tokenizer: Tokenizer, tmp_path: Path) -> None:
    authority = Authority()
    authority.issue().write(tmp_path)
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    certificates = certificate_store(tmp_path / "tls.crt", tmp_path / "tls.key", None)
    limits = ReaderLimits(write_timeout_s=WRITE_TIMEOUT_S)
    with serving(tokenizer, limits, certificates=certificates) as server:
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        with opened(server, context=context, stream=True):
            wait_for(lambda: server.engine.num_sequences)
            wait_for(lambda: is_idle(server), timeout_s=PATIENCE_S)
            assert num_stalled(server, "http") == 1


def test_reader_that_reads_is_not_disconnected(impatient: Server) -> None:
    before = num_stalled(impatient, "http")
    received = b""
    with opened(impatient, stream=True, max_tokens=60) as connection:
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(2**16)
            time.sleep(0.001)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert num_stalled(impatient, "http") == before


def test_grpc_reader_that_stops_is_aborted(impatient: Server) -> None:
    before = num_stalled(impatient, "grpc")
    servicer = impatient.frontends.servicer
    with grpc.insecure_channel(impatient.grpc_target, CHANNEL_OPTIONS) as channel:
        call = pagedray_pb2_grpc.GenerationServiceStub(channel).Generate(message())
        next(call)
        wait_for(lambda: is_idle(impatient), timeout_s=PATIENCE_S)
        # gRPC keeps its last messages until the client reads them or leaves.
        wait_for(lambda: servicer.buffers.num_bytes == 2**16, timeout_s=PATIENCE_S)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert "did not accept a message within 0.5 s" in str(caught.value)
    assert num_stalled(impatient, "grpc") == before + 1
    wait_for(lambda: servicer.buffers.num_bytes == 0)


def test_grpc_reader_of_a_large_answer_that_stops_is_aborted(impatient: Server) -> None:
    buffers = impatient.frontends.servicer.buffers
    before = num_stalled(impatient, "grpc")
    with grpc.insecure_channel(impatient.grpc_target, CHANNEL_OPTIONS) as channel:
        # One message, which a streaming client need not read.
        detokenize = channel.unary_stream(
            "/pagedray.v1.GenerationService/Detokenize",
            request_serializer=pb.DetokenizeRequest.SerializeToString,
            response_deserializer=pb.DetokenizeResponse.FromString,
        )
        answers = iter(detokenize(pb.DetokenizeRequest(token_ids=[270] * 2**17)))
        # gRPC keeps it until the client reads it or leaves.
        wait_for(lambda: buffers.num_bytes, timeout_s=PATIENCE_S)
        num_held = buffers.num_bytes
        assert num_held == next(answers).ByteSize() > 2**17
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert num_stalled(impatient, "grpc") == before + 1
    wait_for(lambda: buffers.num_bytes == 0)


@pytest.mark.parametrize("leave", ["cancel", "disconnect"])
def test_stalled_grpc_client_that_leaves_is_forgotten(impatient: Server, leave: str) -> None:
    servicer = impatient.frontends.servicer
    with grpc.insecure_channel(impatient.grpc_target, CHANNEL_OPTIONS) as channel:
        call = pagedray_pb2_grpc.GenerationServiceStub(channel).Generate(message())
        next(call)
        wait_for(lambda: servicer.buffers.num_bytes == 2**16, timeout_s=PATIENCE_S)
        if leave == "cancel":
            call.cancel()
            wait_for(lambda: servicer.buffers.num_bytes == 0)
    wait_for(lambda: servicer.buffers.num_bytes == 0)


def test_grpc_clients_that_leave_during_a_write_are_no_error(
    impatient: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with grpc.insecure_channel(impatient.grpc_target, CHANNEL_OPTIONS) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.Generate(message()) for _ in range(16)]
        for call in calls:
            next(call)
        # Most writes wait for the clients by then.
        time.sleep(0.3)
    wait_for(lambda: is_idle(impatient))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_unread_output_is_bounded_before_the_deadline(tokenizer: Tokenizer) -> None:
    limits = ReaderLimits(unread_buffer=BufferLimits(32 * 2**19))
    with serving(tokenizer, limits) as server:
        server.engine.waits_for_reader = False
        most = 0
        with opened(server, stream=True) as connection:
            wait_for(lambda: server.engine.num_sequences)
            while server.engine.num_sequences:
                most = max(most, server.frontends.servicer.buffers.num_bytes)
                time.sleep(0.005)
            received = b""
            while b"data: [DONE]" not in received[-100:]:
                received += connection.recv(2**20)
        assert b"a call may leave at most 524288 bytes of output unread" in received[-1000:]
        assert 0 < most <= limits.unread_buffer.call_bytes
        wait_for(lambda: is_idle(server), timeout_s=PATIENCE_S)
        assert server.frontends.servicer.buffers.num_bytes == 0


def test_other_streams_run_on_beside_a_stalled_one(impatient: Server) -> None:
    text = httpx.post(f"{impatient.url}/v1/completions", json={"model": "tiny", "prompt": "x"})
    texts = []
    with opened(impatient, stream=True):
        wait_for(lambda: impatient.engine.num_sequences)
        ask = threading.Thread(
            target=lambda: texts.append(
                httpx.post(f"{impatient.url}/v1/completions", json={"model": "tiny", "prompt": "x"})
            )
        )
        ask.start()
        ask.join(60)
    assert [one.json()["choices"] for one in texts] == [text.json()["choices"]]
    wait_for(lambda: is_idle(impatient), timeout_s=PATIENCE_S)
