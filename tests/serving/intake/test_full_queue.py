"""While the queue is full, both frontends reject calls before they read them."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from cluster.serving.auth import Authenticator, digest_of, new_key
from cluster.serving.ray_serve.grpc_frontend import ServeGrpc
from cluster.serving.ray_serve.options import MessagePace
from pagedray.errors import OverloadedError
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.grpc_frontend import GrpcFrontend, grpc_frontend, status_of_call
from tests.serving.ray_serve.test_frontends import Context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import httpx
    from google.rpc.status_pb2 import Status

    from cluster.serving.servicer import Servicer
    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

KEY = new_key()
WORK = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
COUNTER = 'pagedray_requests_total{{frontend="{}",outcome="overloaded"}}'


@pytest.fixture
def full(engine: FakeEngine) -> FakeEngine:
    engine.rejection = OverloadedError("The queue is full.", retry_after_s=2.5)
    return engine


def num_rejected(servicer: Servicer, frontend: str) -> float:
    text = servicer.metrics.render().decode()
    found = [one for one in text.splitlines() if one.startswith(COUNTER.format(frontend))]
    return sum(float(line.split()[-1]) for line in found)


@pytest.mark.parametrize("path", WORK)
def test_http_reads_no_body_while_the_queue_is_full(
    http: httpx.Client, server: Server, full: FakeEngine, path: str
) -> None:
    before = num_rejected(server.frontends.servicer, "http")
    answer = http.post(path, content=b"{", headers={"content-type": "text/plain"})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert num_rejected(server.frontends.servicer, "http") == before + 1


def test_http_keeps_the_connection_of_a_large_body_it_rejects(
    server: Server, full: FakeEngine
) -> None:
    # One connection, without reconnecting.
    connection = HTTPConnection("127.0.0.1", server.frontends.http_port, timeout=60)
    connection.connect()
    connection.auto_open = 0
    headers = {"Content-Type": "application/json"}
    with closing(connection):
        connection.request("POST", WORK[0], b" " * 3 * 2**20, headers)
        rejection = connection.getresponse()
        assert (rejection.status, rejection.read()[:9]) == (429, b'{"error":')
        full.rejection = None
        body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2})
        connection.request("POST", WORK[0], body, headers)
        assert connection.getresponse().status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/loads"])
def test_http_serves_what_needs_no_queue(http: httpx.Client, full: FakeEngine, path: str) -> None:
    assert http.get(path).status_code == 200


@pytest.fixture
async def frontend(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[GrpcFrontend]:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(f'[tenants.red]\nkeys = ["sha256:{digest_of(KEY).hex()}"]\n')
    async with grpc_frontend(tokenizer, authenticator=Authenticator(path)) as frontend:
        frontend.engine.rejection = OverloadedError("The queue is full.", retry_after_s=2.5)
        yield frontend


async def _rejected(
    frontend: GrpcFrontend, method: str, key: str
) -> tuple[grpc.StatusCode, Status]:
    """Return the error of a call with a malformed message."""
    path = f"/pagedray.v1.GenerationService/{method}"
    async with grpc.aio.insecure_channel(frontend.target) as channel:
        metadata = (("authorization", f"Bearer {key}"),)
        call: Any = channel.unary_stream(path)(b"\xff", metadata=metadata)  # type: ignore[call-arg]  # Any: grpc-stubs asks for what has a default
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 60.0)
    return caught.value.code(), status_of_call(caught.value)


@pytest.mark.parametrize("method", ["Generate", "Chat", "Embed"])
async def test_grpc_receives_no_message_while_the_queue_is_full(
    frontend: GrpcFrontend, method: str
) -> None:
    code, status = await _rejected(frontend, method, KEY)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, retry.retry_delay.ToMilliseconds()) == ("OVERLOADED", 2500)
    assert num_rejected(frontend.servicer, "grpc") == 1


@pytest.mark.parametrize(
    ("key", "code"),
    [(KEY, grpc.StatusCode.RESOURCE_EXHAUSTED), ("wrong", grpc.StatusCode.UNAUTHENTICATED)],
)
@pytest.mark.parametrize("method", ["Generate", "Chat", "Embed"])
async def test_serve_parses_no_message_while_the_queue_is_full(
    frontend: GrpcFrontend, method: str, key: str, code: grpc.StatusCode
) -> None:
    service = ServeGrpc(frontend.servicer, MessagePace(1e6))
    context: Any = Context({"authorization": f"Bearer {key}"})  # Any: stands in for Serve's
    if method == "Embed":
        await service.unary(method, b"\xff", context)
    else:
        assert len([one async for one in service.stream(method, b"\xff", context)]) == 1
    assert context.code is code
    assert num_rejected(frontend.servicer, "ray") == (key == KEY)


async def test_grpc_checks_the_key_first(frontend: GrpcFrontend) -> None:
    code, _ = await _rejected(frontend, "Generate", "wrong")
    assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_grpc_serves_what_needs_no_queue(frontend: GrpcFrontend) -> None:
    async with grpc.aio.insecure_channel(frontend.target) as channel:
        metadata = (("authorization", f"Bearer {KEY}"),)
        answer = await frontend.stub(channel).ListModels(pb.ListModelsRequest(), metadata=metadata)
    assert [model.name for model in answer.models] == ["tiny"]


async def test_draining_server_says_so_even_if_the_queue_is_full(frontend: GrpcFrontend) -> None:
    frontend.servicer.stop_accepting()
    async with grpc.aio.insecure_channel(frontend.target) as channel:
        metadata = (("authorization", f"Bearer {KEY}"),)
        call = frontend.stub(channel).Generate(pb.GenerateRequest(text="x"), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
