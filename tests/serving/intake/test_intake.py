"""Calls count from their entry, and bodies that do not end are bounded and cut."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from cluster.serving.auth import Authenticator, digest_of, new_key
from cluster.serving.buffers import BufferLimits
from cluster.serving.call_options import CallOptions
from cluster.serving.engine_client import EngineClient
from cluster.serving.frontend_options import FrontendOptions
from cluster.serving.frontends import Frontends
from cluster.serving.intake import IntakeLimits
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import engine_config
from tests.serving.fake_engine import FakeEngine
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

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
    client.attach_generation_engine(engine)
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
