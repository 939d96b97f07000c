"""Streams through Ray Serve while replicas go: `python -m tests.system.serve_faults`.

Half of the clients stream over gRPC and half over HTTP. It prints how each ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import openai
import ray

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.serve_cluster import ServeCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Ended", "Streams", "cancel_many", "kill_one", "redeploy", "until_whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one stream ended."""

    id: str
    num_tokens: int
    error: str
    """The gRPC code, or the text that HTTP was told; empty if the stream was finished."""


class Streams:
    """Clients that stream a number of tokens each, every other one over HTTP."""

    def __init__(self, cluster: ServeCluster, *, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._channel = grpc.aio.insecure_channel(cluster.grpc_target)
        self._stub = pagedray_pb2_grpc.GenerationServiceStub(self._channel)
        self._openai = openai.AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
        )
        self._tasks: list[asyncio.Task[Ended]] = []

    async def start(self, number: int) -> None:
        """Start streams, and return when the first tokens of each have come."""
        flowing = []
        for index in range(len(self._tasks), len(self._tasks) + number):
            run = self._over_grpc if index % 2 else self._over_http
            flowing.append(asyncio.Event())
            self._tasks.append(asyncio.create_task(run(f"stream-{index}", flowing[-1])))
        await asyncio.gather(*(event.wait() for event in flowing))

    @property
    def num_running(self) -> int:
        """Streams that have not ended."""
        return sum(not task.done() for task in self._tasks)

    async def ended(self) -> list[Ended]:
        """Wait for the ends of all streams."""
        return await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Close the connections."""
        await self._channel.close()  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
        await self._openai.close()

    async def _over_grpc(self, name: str, is_flowing: asyncio.Event) -> Ended:
        request = pb.GenerateRequest(
            request_id=name,
            text=f"{name}: def read(path):\n",
            sampling=pb.SamplingParams(max_tokens=self._num_tokens, ignore_eos=True, seed=1),
        )
        num_tokens, error = 0, ""
        try:
            async for response in self._stub.Generate(request):
                num_tokens += sum(len(one.token_ids) for one in response.sequences)
                is_flowing.set()
        except grpc.aio.AioRpcError as refusal:
            error = refusal.code().name
        is_flowing.set()
        return Ended(id=name, num_tokens=num_tokens, error=error)

    async def _over_http(self, name: str, is_flowing: asyncio.Event) -> Ended:
        num_tokens, error = 0, ""
        try:
            stream = await self._openai.completions.create(
                model="tiny-llama",
                prompt=f"{name}: def read(path):\n",
                max_tokens=self._num_tokens,
                seed=1,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-request-id": name},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                is_flowing.set()
                if chunk.usage is not None:
                    num_tokens = chunk.usage.completion_tokens
        except openai.APIError as refusal:
            error = refusal.message
        is_flowing.set()
        return Ended(id=name, num_tokens=num_tokens, error=error)


async def kill_one(cluster: ServeCluster) -> list[set[str]]:
    """Kill a replica with all its calls; return which calls each replica had."""
    calls = [{call.id for call in one.calls} for one in await cluster.loads()]
    os.kill(next(iter(cluster.replica_pids().values())), signal.SIGKILL)
    return calls


async def until_whole(cluster: ServeCluster, num_replicas: int, timeout_s: float = 300.0) -> float:
    """Wait until so many replicas run; return how long it took."""
    started_s = time.monotonic()
    while len(cluster.replica_pids()) != num_replicas:
        assert time.monotonic() - started_s < timeout_s, "The replicas did not come back."
        await asyncio.sleep(0.2)
    return time.monotonic() - started_s


async def redeploy(
    cluster: ServeCluster, streams: Streams, *, num_at_once: int, **arguments: object
) -> set[str]:
    """Change an argument of every replica, with so many streams at all times; return who went."""
    before = cluster.replica_pids()
    change = asyncio.create_task(asyncio.to_thread(cluster.deploy, **arguments))
    while not change.done():
        await streams.start(max(num_at_once - streams.num_running, 0))
        await asyncio.sleep(0.05)
    await change
    return set(before) - set(cluster.replica_pids())


async def cancel_many(cluster: ServeCluster, *, number: int, seed: int = 0) -> list[float]:
    """Cancel calls over gRPC at random moments; return how long each was known afterwards."""
    chance = random.Random(seed)
    async with grpc.aio.insecure_channel(cluster.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        return [
            await _cancel_one(cluster, stub, f"cancelled-{index}", chance.random() * 0.2)
            for index in range(number)
        ]


async def _cancel_one(
    cluster: ServeCluster,
    stub: pagedray_pb2_grpc.GenerationServiceStub,
    name: str,
    after_s: float,
) -> float:
    sampling = pb.SamplingParams(max_tokens=900, ignore_eos=True, seed=1)
    call = stub.Generate(pb.GenerateRequest(request_id=name, text=name, sampling=sampling))

    async def read() -> None:
        async for _ in call:
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(after_s)
    call.cancel()
    cancelled_s = time.monotonic()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    while any(one.id == name for loads in await cluster.loads() for one in loads.calls):
        if time.monotonic() - cancelled_s > 5.0:
            return math.inf
        await asyncio.sleep(0.01)
    return time.monotonic() - cancelled_s


def _summary(ended: Sequence[Ended], num_tokens: int) -> str:
    ends = Counter(one.error or "finished" for one in ended)
    short = sum(one.num_tokens != num_tokens for one in ended if not one.error)
    named = ", ".join(f"{count} {end!r}" for end, count in ends.most_common())
    return f"{len(ended)} streams: {named}; {short} finished ones lack tokens"


async def _report(num_clients: int, num_tokens: int, num_cancels: int) -> None:
    with ServeCluster() as cluster:
        cluster.deploy()

        streams = Streams(cluster, num_tokens=num_tokens)
        await streams.start(num_clients)
        calls = await kill_one(cluster)
        ended = await streams.ended()
        lost = {one.id for one in ended if one.error}
        print(f"Kill, of replicas with {[len(one) for one in calls]} calls:")
        print(f"  {_summary(ended, num_tokens)}")
        print(f"  the ends are those of one replica: {lost in calls}")
        print(f"  a new replica after {await until_whole(cluster, 2):.1f} s")
        await streams.close()

        streams = Streams(cluster, num_tokens=num_tokens)
        await streams.start(num_clients)
        # Few follow those that end: new replicas start on the same cores.
        gone = await redeploy(cluster, streams, num_at_once=4, stall_timeout_s=100.0)
        print(f"Redeploy of {len(gone)} replicas:")
        print(f"  {_summary(await streams.ended(), num_tokens)}")
        await streams.close()

        known_s = sorted(await cancel_many(cluster, number=num_cancels))
        print(f"Cancels: {num_cancels}, of which {known_s.count(math.inf)} are lost")
        print(f"  gone after {known_s[len(known_s) // 2]:.3f} s, at most {known_s[-1]:.3f} s")


def main() -> None:
    """Start a Ray cluster here, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--cancels", type=int, default=300)
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    asyncio.run(_report(arguments.clients, arguments.tokens, arguments.cancels))


if __name__ == "__main__":
    main()
