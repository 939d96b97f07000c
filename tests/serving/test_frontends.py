"""The lifecycle of the frontends."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.serving.engine_client import EngineClient
from cluster.serving.frontend_options import FrontendOptions
from cluster.serving.frontends import Frontends
from cluster.serving.inputs import GenerationInput
from pagedray.errors import DeviceError, EngineError, ShuttingDownError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import engine_config
from tests.serving.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.serving.text.tokenizer import Tokenizer

STATUS = health_pb2.HealthCheckResponse.ServingStatus


@pytest.fixture
async def client() -> EngineClient:
    return EngineClient(asyncio.get_running_loop())


@pytest.fixture
async def engine(client: EngineClient) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(client, lambda request, index: [72, 73])
    yield engine
    engine.stop()


@pytest.fixture
async def frontends(client: EngineClient, tokenizer: Tokenizer) -> AsyncIterator[Frontends]:
    frontends = _frontends(client, tokenizer)
    await frontends.start_servers()
    yield frontends
    await frontends.stop_servers(0)


def _frontends(
    client: EngineClient, tokenizer: Tokenizer, *, grpc_port: int = 0, http_port: int = 0
) -> Frontends:
    return Frontends(
        client,
        tokenizer,
        engine_config(),
        FrontendOptions(host="127.0.0.1", grpc_port=grpc_port, http_port=http_port),
    )


async def _health(frontends: Frontends) -> tuple[int, int, int]:
    """Return the health over gRPC, and the readiness and the liveness over HTTP."""
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{frontends.grpc_port}") as channel,
        httpx.AsyncClient() as http,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        url = f"http://127.0.0.1:{frontends.http_port}"
        page = await http.get(f"{url}/ready")
        return answer.status, page.status_code, (await http.get(f"{url}/health")).status_code


async def test_health_is_down_until_ready_and_while_draining(
    frontends: Frontends, client: EngineClient, engine: FakeEngine
) -> None:
    assert await _health(frontends) == (STATUS.NOT_SERVING, 503, 503)
    client.attach_generation_engine(engine)
    assert await _health(frontends) == (STATUS.NOT_SERVING, 503, 503)
    await frontends.set_ready()
    assert await _health(frontends) == (STATUS.SERVING, 200, 200)
    engine.is_paused = True
    generation = await frontends.servicer.start_generation(GenerationInput(prompts=("x",)))
    stopping = asyncio.create_task(frontends.stop_servers(60))
    await asyncio.sleep(0.05)
    assert await _health(frontends) == (STATUS.NOT_SERVING, 503, 200)
    generation.close()
    await stopping


async def test_requests_are_rejected_until_ready_and_when_draining(
    frontends: Frontends, client: EngineClient, engine: FakeEngine
) -> None:
    given = GenerationInput(prompts=("x",))
    with pytest.raises(EngineError, match="not loaded yet"):
        await frontends.servicer.start_generation(given)
    client.attach_generation_engine(engine)
    await frontends.set_ready()
    await frontends.stop_servers(0)
    with pytest.raises(ShuttingDownError):
        await frontends.servicer.start_generation(given)
    assert engine.log.submitted == []


async def test_drain_waits_for_running_requests(
    frontends: Frontends, client: EngineClient, engine: FakeEngine
) -> None:
    client.attach_generation_engine(engine)
    await frontends.set_ready()
    engine.step_s = 0.005
    async with grpc.aio.insecure_channel(f"127.0.0.1:{frontends.grpc_port}") as channel:
        call = pagedray_pb2_grpc.GenerationServiceStub(channel).Generate(
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=40))
        )
        reader = aiter(call)
        await anext(reader)
        stopping = asyncio.create_task(frontends.stop_servers(60))
        messages = [message async for message in reader]
        await stopping
    assert messages[-1].usage.num_generated_tokens == 40


async def test_drain_ends_requests_that_run_too_long(
    frontends: Frontends, client: EngineClient, engine: FakeEngine
) -> None:
    client.attach_generation_engine(engine)
    await frontends.set_ready()
    engine.is_paused = True
    body = {"model": "tiny", "prompt": "x"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontends.http_port}") as http:
        posting = asyncio.create_task(http.post("/v1/completions", json=body))
        while not engine.log.submitted:
            await asyncio.sleep(0.005)
        await frontends.stop_servers(0.1)
        answer = await posting
    assert answer.status_code == 503
    assert "shut down before" in answer.json()["error"]["message"]
    assert engine.num_sequences == 0


@pytest.mark.parametrize("frontend", ["grpc_port", "http_port"])
async def test_busy_port_is_named_in_one_line(
    client: EngineClient, tokenizer: Tokenizer, frontend: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        frontends = _frontends(client, tokenizer, **{frontend: port})
        with pytest.raises(DeviceError) as caught:
            await frontends.start_servers()
    assert str(port) in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_only_the_given_host_is_bound(frontends: Frontends) -> None:
    listening = {
        connection.laddr
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    ports = {frontends.grpc_port, frontends.http_port}
    hosts = {address.ip.removeprefix("::ffff:") for address in listening if address.port in ports}
    assert hosts == {"127.0.0.1"}
