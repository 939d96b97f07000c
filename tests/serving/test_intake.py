"""Calls count from their entry, and bodies are bounded while they are received."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo

from cluster.serving.auth import Authenticator, digest_of, new_key
from cluster.serving.engine_client import EngineClient
from cluster.serving.frontend_options import FrontendOptions
from cluster.serving.frontends import Frontends
from cluster.serving.inputs import CallOptions
from cluster.serving.intake import BufferLimits, IntakeLimits, Reception, request_size
from cluster.serving.ray_serve.grpc_frontend import ServeGrpc
from cluster.serving.ray_serve.options import MessagePace
from pagedray.errors import OverloadedError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import engine_config, wait_until
from tests.serving.fake_engine import FakeEngine
from tests.serving.grpc_frontend import GrpcFrontend, grpc_frontend, status_of_call
from tests.serving.ray_serve.test_frontends import Context
from tests.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from google.rpc.status_pb2 import Status

    from cluster.serving.servicer import Servicer
    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server

KEYS = {name: new_key() for name in ("ann", "ben")}
GENERATE = "/pagedray.v1.GenerationService/Generate"
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 1}


class Hostile:
    """Frontends with small limits, and clients of theirs."""

    def __init__(self, frontends: Frontends) -> None:
        self.frontends = frontends
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{frontends.grpc_port}")
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontends.http_port}")
        # Any: the generated stub is not async to mypy
        self.stub: Any = pagedray_pb2_grpc.GenerationServiceStub(self.channel)
        self._calls: list[Any] = []
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def num_bytes(self) -> int:
        return self.frontends.servicer.intake.reception.num_bytes

    def call(self, tenant: str = "ann", path: str = GENERATE) -> Any:  # Any: as for the stub
        """Begin a gRPC call whose message never comes."""
        ended = asyncio.Event()

        async def messages() -> AsyncIterator[bytes]:
            await ended.wait()
            yield b""

        start = self.channel.stream_stream(path, bytes, bytes)
        call = start(messages(), metadata=metadata(tenant))
        self._calls.append(call)
        return call

    async def post(
        self, num_bytes: int, tenant: str = "ann", path: str = "/v1/completions"
    ) -> asyncio.StreamReader:
        """Begin an HTTP request of which only so many bytes of the body come."""
        port = self.frontends.http_port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[tenant]}\r\n"
            "Content-Type: application/json\r\nContent-Length: 60000\r\n\r\n"
        )
        writer.write(head.encode() + b" " * num_bytes)
        self._writers.append(writer)
        return reader

    async def generate(self, tenant: str) -> None:
        """Make an honest gRPC call."""
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1))
        async for _ in self.stub.Generate(request, metadata=metadata(tenant)):
            pass

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        for writer in self._writers:
            writer.close()
        await self.channel.close(None)
        await self.http.aclose()


def metadata(tenant: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {KEYS[tenant]}"),)


def headers(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


@asynccontextmanager
async def hostile(
    tokenizer: Tokenizer, folder: Path, limits: IntakeLimits, *, max_requests: int = 100
) -> AsyncIterator[Hostile]:
    client = EngineClient(asyncio.get_running_loop())
    engine = FakeEngine(client, lambda request, index: [72])
    client.attach_engine(engine)
    path = folder / "keys.toml"
    path.touch(0o600)
    path.write_text(
        "\n".join(
            f'[tenants.{name}]\nkeys = ["sha256:{digest_of(key).hex()}"]\n'
            f"max_requests = {max_requests}"
            for name, key in KEYS.items()
        )
    )
    frontends = Frontends(
        client,
        tokenizer,
        engine_config(),
        FrontendOptions(
            host="127.0.0.1", grpc_port=0, http_port=0, calls=CallOptions(intake_limits=limits)
        ),
        authenticator=Authenticator(path),
    )
    await frontends.start_servers()
    await frontends.set_ready()
    one = Hostile(frontends)
    try:
        yield one
        await one.close()
        await wait_until(lambda: one.num_bytes == 0)
    finally:
        await frontends.stop_servers(0)
        engine.stop()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_call_counts_while_its_body_arrives(
    tokenizer: Tokenizer, tmp_path: Path, path: str
) -> None:
    async with hostile(tokenizer, tmp_path, IntakeLimits(), max_requests=1) as server:
        await server.post(10, path=path)
        await wait_until(lambda: server.num_bytes == 10)
        answer = await server.http.post("/v1/completions", json=BODY, headers=headers("ann"))
        assert answer.status_code == 429
        assert "1 open call, which is its limit" in answer.text
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await server.stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata("ann"))
        assert rejected.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await server.generate("ben")


@pytest.mark.parametrize("method", ["Generate", "Chat", "Tokenize"])
async def test_a_call_counts_while_its_message_arrives(
    tokenizer: Tokenizer, tmp_path: Path, method: str
) -> None:
    async with hostile(tokenizer, tmp_path, IntakeLimits(), max_requests=1) as server:
        server.call(path=f"/pagedray.v1.GenerationService/{method}")
        await wait_until(lambda: server.num_bytes > 0)
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await server.generate("ann")
        assert rejected.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = await server.http.post("/tokenize", json={"prompt": "x"}, headers=headers("ann"))
        assert answer.status_code == 429
        # Calls that free something are not counted.
        await server.stub.Abort(pb.AbortRequest(), metadata=metadata("ann"))
        await server.generate("ben")


async def test_calls_that_leave_free_their_place(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with hostile(tokenizer, tmp_path, IntakeLimits(), max_requests=1) as server:
        for bad in ({**BODY, "n": 0}, {**BODY, "nonsense": 1}, BODY):
            await server.http.post("/v1/completions", json=bad, headers=headers("ann"))
        call = server.call()
        await wait_until(lambda: server.num_bytes > 0)
        call.cancel()
        await wait_until(lambda: server.num_bytes == 0)
        await server.generate("ann")


async def test_bytes_of_unfinished_bodies_are_bounded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    limits = IntakeLimits(received=BufferLimits(2**19))
    async with hostile(tokenizer, tmp_path, limits) as server:
        for _ in range(2):
            await server.post(50_000)
        await wait_until(lambda: server.num_bytes == 100_000)
        rejected = await (await server.post(50_000)).readline()
        assert rejected.startswith(b"HTTP/1.1 429")
        assert server.num_bytes == 100_000
        answer = await server.http.post("/v1/completions", json=BODY, headers=headers("ben"))
        assert answer.status_code == 200


async def test_messages_that_never_come_hold_bounded_memory(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    # Two messages of 96 KiB at a time, and one more that waits.
    limits = IntakeLimits(received=BufferLimits(2**20), request_bytes=2**16, wait_s=0.1)
    async with hostile(tokenizer, tmp_path, limits) as server:
        codes = [asyncio.ensure_future(server.call().code()) for _ in range(6)]
        await wait_until(lambda: sum(one.done() for one in codes) == 4)
        rejected = {await one for one in codes if one.done()}
        assert rejected == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert server.num_bytes == 2 * 96 * 2**10
        await server.generate("ben")
        for one in codes:
            one.cancel()


async def test_a_body_or_message_that_does_not_end_is_cut(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with hostile(tokenizer, tmp_path, IntakeLimits(read_timeout_s=0.1)) as server:
        call = server.call()
        reader = await server.post(100)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        assert b"--read-timeout-s" in await reader.read()
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "--read-timeout-s" in await call.details()


async def test_lists_longer_than_the_context_are_not_parsed(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with hostile(tokenizer, tmp_path, IntakeLimits()) as server:
        ids = {**BODY, "prompt": [1] * 10_000}
        answer = await server.http.post("/v1/completions", json=ids, headers=headers("ann"))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "of 10000 entries" in error["message"]
        assert "--max-model-len" in error["message"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}] * 300}
        answer = await server.http.post("/v1/chat/completions", json=chat, headers=headers("ann"))
        assert answer.status_code == 400
        assert "at most 256 entries" in answer.json()["error"]["message"]
        long = " " * (2 * 2**20)
        answer = await server.http.post(
            "/tokenize", content=long, headers=headers("ann") | {"content-type": "application/json"}
        )
        assert answer.status_code == 413
        assert "--max-request-kib" in answer.text


async def test_large_requests_are_parsed_beside_the_event_loop(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with hostile(tokenizer, tmp_path, IntakeLimits()) as server:
        intake, loop_thread = server.frontends.servicer.intake, threading.get_ident()
        assert await intake.parse(100, threading.get_ident) == loop_thread
        assert await intake.parse(2**20, threading.get_ident) != loop_thread


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


@pytest.mark.parametrize(
    ("context", "num_bytes"), [(256, 2**20 + 2**18), (1024, 2**21), (2**17, 2**22)]
)
def test_a_full_batch_of_prompts_fits(context: int, num_bytes: int) -> None:
    size = request_size(engine_config(context), IntakeLimits())
    assert size.num_bytes == num_bytes
    assert size.num_list_values >= context
    assert size.num_values >= min(128 * context, 2**20)


def test_an_encoder_takes_many_texts_whatever_its_context() -> None:
    config = engine_config(512)
    size = request_size(replace(config, model=replace(config.model, task="embed")), IntakeLimits())
    assert (size.num_bytes, size.num_values) == (2**22, 2**20)


def test_an_operator_sets_the_size() -> None:
    assert request_size(engine_config(), IntakeLimits(request_bytes=2**16)).num_bytes == 2**16


@pytest.fixture
def reception() -> Reception:
    """400 bytes for all tenants, 100 for each."""
    return Reception(BufferLimits(400), wait_s=1.0, note_freed=ignore)


def ignore(_: int) -> None:
    """Do nothing with bytes that are freed."""


def test_a_tenant_may_not_exceed_its_quarter(reception: Reception) -> None:
    with reception.open_message("ann") as first, reception.open_message("ann") as second:
        first.add(60)
        with pytest.raises(OverloadedError, match=r"this API key's tenant.* 100 bytes"):
            second.add(41)
        second.add(40)
        assert reception.num_bytes == 100
        with reception.open_message("ben") as other:
            other.add(100)
    assert reception.num_bytes == 0


def test_bytes_are_freed_when_a_message_is_parsed() -> None:
    freed: list[int] = []
    reception = Reception(BufferLimits(400), wait_s=0.05, note_freed=freed.append)
    with reception.open_message("ann") as message:
        message.add(100)
        message.shrink_to(60)
        assert freed == []
    assert freed == [60]


def test_all_tenants_together_may_not_exceed_the_total(reception: Reception) -> None:
    messages = [reception.open_message(name) for name in "abcd"]
    for message in messages:
        message.add(100)
    late = reception.open_message("e")
    with pytest.raises(OverloadedError, match="400 bytes together"):
        late.add(1)
    messages[0].shrink_to(99)
    late.add(1)


@in_virtual_time
async def test_a_message_waits_until_those_before_it_have_arrived(reception: Reception) -> None:
    first, second, third = (reception.open_message("ann") for _ in range(3))
    await first.wait_room(80)
    waiting = [asyncio.create_task(one.wait_room(80)) for one in (second, third)]
    await asyncio.sleep(0.1)
    assert not any(one.done() for one in waiting)
    first.shrink_to(0)
    await asyncio.sleep(0.1)
    assert [one.done() for one in waiting] == [True, False]
    second.shrink_to(20)
    await waiting[1]
    assert reception.num_bytes == 100


@in_virtual_time
async def test_a_message_that_waits_long_is_rejected(reception: Reception) -> None:
    with reception.open_message("ann") as first, reception.open_message("ann") as second:
        await first.wait_room(80)
        with pytest.raises(OverloadedError, match="receive-buffer-mib"):
            await second.wait_room(80)
        await reception.open_message("ben").wait_room(80)


async def test_counts_stay_exact_when_messages_are_cancelled() -> None:
    reception = Reception(BufferLimits(400), wait_s=60.0, note_freed=ignore)
    chance = random.Random(0)

    async def receive(tenant: str) -> None:
        with reception.open_message(tenant) as message:
            await message.wait_room(chance.choice((10, 40, 90)))
            assert reception.num_bytes <= 400
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            message.shrink_to(chance.randrange(10))
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(receive(chance.choice("abcde"))) for _ in range(300)]
    while not all(task.done() for task in tasks):
        chance.choice(tasks).cancel()
        await asyncio.sleep(0)
    assert reception.num_bytes == 0
    assert not any(task.exception() for task in tasks if not task.cancelled())
