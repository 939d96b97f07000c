"""The frontends on a real local engine in one event loop: cancelled streams leave no task."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest

from cluster.engine.engine_loop import EngineLoop
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.open_engine import make_executor
from cluster.serving.engine_client import EngineClient
from cluster.serving.frontend_options import FrontendOptions
from cluster.serving.frontends import Frontends
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.server_process import TINY_LLAMA

NUM_STREAMS = 64
NUM_TOKENS = 24
NUM_READ = 4
"""Tokens after which a stream is cancelled."""


class Served:
    """Frontends, and the engine behind them."""

    def __init__(self, frontends: Frontends, controller: EngineLoop) -> None:
        self.frontends = frontends
        self.controller = controller


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    config = engine_config(
        TINY_LLAMA, EngineOptions(executor="local", device="cpu", num_threads=1, num_blocks=512)
    )
    client = EngineClient(asyncio.get_running_loop())
    tokenizer = Tokenizer.from_folder(TINY_LLAMA)
    options = FrontendOptions(host="127.0.0.1", grpc_port=0, http_port=0)
    frontends = Frontends(client, tokenizer, config, options)
    executor = make_executor(config, lambda what, fraction: None)
    controller = EngineLoop(config, executor, client)
    controller.start_steps()
    client.attach_engine(controller)
    await frontends.start_servers()
    await frontends.set_ready()
    yield Served(frontends, controller)
    await frontends.stop_servers(0.0)
    controller.stop_steps()
    executor.close()


async def over_grpc(served: Served) -> list[int]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.frontends.grpc_port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        return await asyncio.gather(
            *(one_over_grpc(stub, is_cancelled=index % 3 == 0) for index in range(NUM_STREAMS))
        )


async def one_over_grpc(
    stub: pagedray_pb2_grpc.GenerationServiceStub, *, is_cancelled: bool
) -> int:
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    call = stub.Generate(pb.GenerateRequest(text="import os", sampling=sampling))
    num_tokens = 0
    async for response in call:
        num_tokens += sum(len(sequence.token_ids) for sequence in response.sequences)
        if is_cancelled and num_tokens >= NUM_READ:
            call.cancel()
            break
    return num_tokens


async def over_http(served: Served) -> list[int]:
    url = f"http://127.0.0.1:{served.frontends.http_port}"
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60.0) as http:
        return await asyncio.gather(
            *(one_over_http(http, is_cancelled=index % 3 == 0) for index in range(NUM_STREAMS))
        )


async def one_over_http(http: httpx.AsyncClient, *, is_cancelled: bool) -> int:
    body = {
        "model": "tiny-llama",
        "prompt": "import os",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    num_chunks = num_tokens = 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            num_chunks += 1
            usage = json.loads(line.removeprefix("data: ")).get("usage")
            num_tokens = usage["completion_tokens"] if usage else num_tokens
            if is_cancelled and num_chunks >= NUM_READ:
                break
    return num_tokens


@pytest.mark.parametrize("call_all", [over_grpc, over_http], ids=["grpc", "http"])
async def test_cancelled_streams_leave_no_task(served: Served, call_all) -> None:  # type: ignore[no-untyped-def]  # one of two functions
    # Tasks that are created once exist before the count.
    await call_all(served)
    await settle(served)
    before = running_tasks()

    nums_tokens = await call_all(served)
    assert sum(num == NUM_TOKENS for num in nums_tokens) >= NUM_STREAMS * 2 // 3
    await settle(served)
    assert running_tasks() == before
    stats = served.controller.stats().scheduler
    assert (stats.num_running, stats.num_waiting, stats.num_queued_requests) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert served.frontends.servicer.num_open_calls == 0


def running_tasks() -> Counter[str]:
    """Return the number of tasks by coroutine, without gRPC's own, which vary."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return Counter(getattr(one, "__qualname__", repr(type(one))) for one in coroutines)


async def settle(served: Served) -> None:
    """Wait until the clients' connections are closed and their requests have ended."""
    deadline_s = time.monotonic() + 60.0
    last: Counter[str] = Counter()
    while time.monotonic() < deadline_s:
        is_busy = (
            served.frontends.servicer.num_open_calls
            or served.controller.stats().scheduler.num_running
        )
        if not is_busy and running_tasks() == last:
            return
        last = running_tasks()
        await asyncio.sleep(0.2)
