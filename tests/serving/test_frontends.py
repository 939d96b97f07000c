"""The lifecycle of the frontends, the client of the engine, and names of models."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import grpc
import httpx
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.scheduling.event import TokenEvent
from cluster.serving.engine_client import EngineClient
from cluster.serving.frontend_options import FrontendOptions
from cluster.serving.frontends import Frontends
from cluster.serving.inputs import GenerationInput, with_served_names
from cluster.serving.intake import BufferLimits, OutputBuffers
from pagedray.batch import TokenLogprobs
from pagedray.errors import (
    DeviceError,
    EngineError,
    OverloadedError,
    ShuttingDownError,
    StartupError,
    WorkerError,
)
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server, engine_config
from tests.serving.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from cluster.engine.stats import EngineStats
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

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
    client.attach_engine(engine)
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
    client.attach_engine(engine)
    await frontends.set_ready()
    await frontends.stop_servers(0)
    with pytest.raises(ShuttingDownError):
        await frontends.servicer.start_generation(given)
    assert engine.log.submitted == []


async def test_drain_waits_for_running_requests(
    frontends: Frontends, client: EngineClient, engine: FakeEngine
) -> None:
    client.attach_engine(engine)
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
    client.attach_engine(engine)
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


class _Recorder:
    """An engine that only records its calls."""

    is_healthy = True

    def __init__(self, *, room: int = 8) -> None:
        self.room = room
        self.calls: list[tuple[object, ...]] = []

    def submit_request(self, request: Request) -> None:
        if len([call for call in self.calls if call[0] == "submit_request"]) == self.room:
            raise OverloadedError("The queue is full.")
        self.calls.append(("submit_request", request.id))

    def abort_request(self, request_id: str) -> None:
        self.calls.append(("abort_request", request_id))

    def finish_sequence(self, request_id: str, index: int) -> None:
        self.calls.append(("finish_sequence", request_id, index))

    def stats(self) -> EngineStats:
        raise NotImplementedError


@pytest.fixture
def recorder() -> _Recorder:
    return _Recorder()


@pytest.fixture
async def engine_client(recorder: _Recorder) -> EngineClient:
    client = EngineClient(asyncio.get_running_loop())
    client.attach_engine(recorder)  # type: ignore[arg-type]  # narrower stubs than the library
    return client


def _request(name: str = "r", n: int = 1) -> Request:
    return Request(id=name, prompt_token_ids=(1,), sampling=SamplingParams(n=n), seed=0)


def _end(name: str = "r", index: int = 0) -> TokenEvent:
    return TokenEvent(name, index, (9,), finish_reason=FinishReason.LENGTH)


async def test_events_from_a_thread_reach_their_stream(engine_client: EngineClient) -> None:
    stream = engine_client.open_stream([_request()])
    events = [TokenEvent("r", 0, (5,)), TokenEvent("other", 0, (6,)), _end()]
    threading.Thread(target=engine_client.publish, args=(events,)).start()
    assert [event async for batch in stream for event in batch] == [events[0], events[2]]


async def test_a_slow_reader_gets_all_events_at_once(engine_client: EngineClient) -> None:
    stream = engine_client.open_stream([_request()])
    for token_id in range(5):
        engine_client.publish([TokenEvent("r", 0, (token_id,))])
    await asyncio.sleep(0)
    assert len(await anext(stream)) == 5
    stream.close()


async def test_leaving_early_aborts(engine_client: EngineClient, recorder: _Recorder) -> None:
    async with engine_client.open_stream([_request()]):
        pass
    assert recorder.calls == [("submit_request", "r"), ("abort_request", "r")]


async def test_leaving_at_the_end_does_not(
    engine_client: EngineClient, recorder: _Recorder
) -> None:
    async with engine_client.open_stream([_request()]) as stream:
        engine_client.publish([_end()])
        assert len([batch async for batch in stream]) == 1
    assert recorder.calls == [("submit_request", "r")]


async def test_finished_sequences_end_the_stream(
    engine_client: EngineClient, recorder: _Recorder
) -> None:
    async with engine_client.open_stream([_request(n=2)]) as stream:
        stream.finish_sequence("r", 0)
        engine_client.publish([TokenEvent("r", 0, (5,)), _end(index=1)])
        assert [event.index async for batch in stream for event in batch] == [1]
    assert recorder.calls == [("submit_request", "r"), ("finish_sequence", "r", 0)]


async def test_abort_ends_each_sequence_once(engine_client: EngineClient) -> None:
    stream = engine_client.open_stream([_request(n=2)])
    stream.abort()
    engine_client.publish([_end()])
    events = [event async for batch in stream for event in batch]
    assert [(event.index, event.finish_reason) for event in events] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]


async def test_failure_reaches_every_stream_after_its_tokens(engine_client: EngineClient) -> None:
    stream = engine_client.open_stream([_request()])
    engine_client.publish([TokenEvent("r", 0, (5,))])
    engine_client.fail_all(WorkerError("A rank died."))
    await asyncio.sleep(0)
    assert len(await anext(stream)) == 1
    with pytest.raises(WorkerError):
        await anext(stream)


async def test_events_count_until_they_are_read(engine_client: EngineClient) -> None:
    buffers = OutputBuffers(BufferLimits())
    stream = engine_client.open_stream([_request()], buffer=buffers.open_buffer("ann"))
    few = [TokenEvent("r", 0, (5,))] * 68
    engine_client.publish(few)
    await asyncio.sleep(0)
    assert buffers.num_bytes == 0
    logprobs = TokenLogprobs(-1.0, [5] * 20, [-1.0] * 20)
    engine_client.publish(
        [TokenEvent("r", 0, (5,)), TokenEvent("r", 0, (5,), logprobs=(logprobs,))]
    )
    await asyncio.sleep(0)
    # The numbers and ids alone take 24 bytes each.
    assert buffers.num_bytes > 40 * 24
    assert len(await anext(stream)) == 70
    assert buffers.num_bytes == 0
    stream.close()


async def test_rejected_request_aborts_the_others_of_its_call() -> None:
    recorder = _Recorder(room=1)
    client = EngineClient(asyncio.get_running_loop())
    client.attach_engine(recorder)  # type: ignore[arg-type]  # narrower stubs than the library
    with pytest.raises(OverloadedError):
        client.open_stream([_request("a"), _request("b")])
    assert ("abort_request", "a") in recorder.calls


async def test_without_an_engine_there_is_an_error() -> None:
    with pytest.raises(EngineError, match="not loaded"):
        EngineClient(asyncio.get_running_loop()).open_stream([_request()])


@contextlib.contextmanager
def _closed_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    loop.close()
    yield loop


def test_publishing_to_a_closed_loop_is_harmless() -> None:
    with _closed_loop() as loop:
        EngineClient(loop).publish([_end()])


NAMES = ("first", "second", "org/third")


class NamedServer(Server):
    def config(self, context: int) -> EngineConfig:
        return with_served_names(super().config(context), (*NAMES, "second"))


@pytest.fixture(scope="module")
def named(tokenizer: Tokenizer) -> Iterator[NamedServer]:
    with NamedServer(tokenizer) as server:
        yield server


def test_clients_may_give_each_name(named: NamedServer) -> None:
    with openai.OpenAI(base_url=f"{named.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == list(NAMES)
        for name in NAMES:
            assert client.models.retrieve(name).id == name
            completion = client.completions.create(model=name, prompt="a", max_tokens=1)
            assert completion.model == "first"
    messages = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    answer = httpx.post(f"{named.url}/v1/messages", json={"model": "second", **messages})
    assert answer.json()["model"] == "first"


def test_grpc_clients_may_give_each_name(named: NamedServer) -> None:
    with grpc.insecure_channel(named.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        models = stub.ListModels(pb.ListModelsRequest()).models
        assert [model.name for model in models] == list(NAMES)
        for name in NAMES:
            sampling = pb.SamplingParams(max_tokens=1)
            list(stub.Generate(pb.GenerateRequest(model=name, text="a", sampling=sampling)))
        with pytest.raises(grpc.RpcError, match="serves 'first', 'second' or 'org/third'"):
            list(stub.Generate(pb.GenerateRequest(model="tiny", text="a")))


def test_other_names_are_rejected(named: NamedServer) -> None:
    body = {"model": "tiny", "prompt": "a"}
    answer = httpx.post(f"{named.url}/v1/completions", json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "The model 'tiny' does not exist; this server serves 'first', 'second' or 'org/third'."
    )


def test_a_model_keeps_its_name_without_others() -> None:
    config = engine_config()
    assert with_served_names(config, ()) is config
    with pytest.raises(StartupError, match="served_model_name must not be empty"):
        with_served_names(config, ("a", ""))
