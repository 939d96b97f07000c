"""Streamed tokens a second through Ray Serve, with ranks that compute nothing.

    python -m bench.ray_serve --streams 64

The real application on a real local Ray cluster, one replica whose steps take no longer than they
are told to. What is measured is the way of a token from a step through Serve's proxy to a client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import sys
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import httpx
import ray
from ray import serve

from cluster.executor import CacheSize, Executor
from cluster.serving.deployment import PagedRay, deployment_options
from cluster.serving.serve_options import read_arguments
from pagedray.batch import StepOutput
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from pagedray.batch import StepPlan
    from pagedray.config import EngineConfig

MODEL = Path(__file__).resolve().parent.parent / "examples" / "tiny-llama"
HTTP_PORT = 18123
GRPC_PORT = 19123
STEP_S = 0.005
TOKEN = 343


class TimedExecutor(Executor):
    """Ranks that sample one token again and again, at the pace of a GPU."""

    def __init__(self, config: EngineConfig, placement: PlacementGroup | None) -> None:
        self._plans: deque[StepPlan] = deque()
        self._step = -1

    @property
    def cache_size(self) -> CacheSize:
        return CacheSize(65_536, 0)

    @property
    def acknowledged_step(self) -> int:
        return self._step

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepOutput:
        time.sleep(STEP_S)
        plan = self._plans.popleft()
        self._step = plan.step
        return StepOutput(plan.step, [TOKEN] * sum(one.is_sampled for one in plan.sequences))

    def restart(self) -> None:
        self._plans.clear()
        self._step = -1

    def close(self) -> None:
        self._plans.clear()


class TimedPagedRay(PagedRay):
    """The deployment over such ranks."""

    make_executor = TimedExecutor

    async def __init__(self, *arguments: object) -> None:  # type: ignore[misc]  # Serve awaits it
        await super().__init__(*arguments)  # type: ignore[arg-type]  # the stubs are narrower than the library


async def over_http(num_streams: int, num_tokens: int) -> int:
    """Return how many tokens all streams brought."""
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": num_tokens, "ignore_eos": True}

    async def one(client: httpx.AsyncClient) -> int:
        usage = 0
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=request) as answer:
            async for line in answer.aiter_lines():
                # Most lines need not be understood.
                if line.startswith("data: {") and '"choices":[]' in line:
                    usage = json.loads(line[6:])["usage"]["completion_tokens"]
        return usage

    url, limits = f"http://127.0.0.1:{HTTP_PORT}", httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(num_streams))))


async def over_grpc(num_streams: int, num_tokens: int) -> int:
    """Return how many tokens all streams brought."""
    sampling = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True)

    async def one(stub: pagedray_pb2_grpc.GenerationServiceStub) -> int:
        answers = stub.Generate(pb.GenerateRequest(text="x", sampling=sampling))
        return sum([len(one.token_ids) async for answer in answers for one in answer.sequences])

    async with grpc.aio.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        return sum(await asyncio.gather(*(one(stub) for _ in range(num_streams))))


def start() -> None:
    """Start a Ray cluster and the application on it."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    serve.start(
        http_options={"host": "127.0.0.1", "port": HTTP_PORT},
        grpc_options={
            "port": GRPC_PORT,
            "grpc_servicer_functions": ["cluster.serving.serve_grpc_proxy.add_services"],
        },
    )
    arguments = read_arguments({"model": str(MODEL), "device": "cpu", "executor": "local"})
    options = deployment_options(arguments)
    serve.run(serve.deployment(TimedPagedRay, **options).bind(arguments), route_prefix="/")  # type: ignore[attr-defined]  # Serve's decorator


def main() -> None:
    """Measure, and print a JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parser.parse_args()
    start()
    for run in (over_http, over_grpc):
        for num_streams in arguments.streams or (16, 64):
            asyncio.run(run(num_streams, 20))
            started_s = time.perf_counter()
            num_tokens = asyncio.run(run(num_streams, arguments.tokens))
            seconds = time.perf_counter() - started_s
            record = {
                "front": run.__name__,
                "streams": num_streams,
                "tokens": num_tokens,
                "tokens_per_s": round(num_tokens / seconds),
                "step_s": STEP_S,
                "cores": os.cpu_count(),
                "machine": platform.machine(),
                "when": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": " ".join(["python -m bench.ray_serve", *sys.argv[1:]]),
            }
            print(json.dumps(record), flush=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
