"""Clients of the application that cancel, disconnect or stop reading leave nothing behind."""

import asyncio
import math
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from cluster.serving.server_info import ServerLoads
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.ray_serve.application import LEASE_S, logged
from tests.system.serve_clients import CancelFrontend, cancel_many
from tests.system.serve_cluster import ServeCluster

pytestmark = pytest.mark.slow

LEASE_EXPIRED = "Cancelled a stream because its caller stopped renewing the lease."


async def test_an_unread_stream_ends(cluster: ServeCluster) -> None:
    # To a replica, a lost cancel and a dead caller look like this.
    sampling = {"max_tokens": 900, "ignore_eos": True, "n": 24}
    generate: Any = cluster.handle.options(stream=True).generate  # Any: untyped
    read, dropped = (
        generate.remote(name, sampling, request_id=name) for name in ("read", "dropped")
    )
    reading = asyncio.create_task(collect(read))
    await anext(dropped)
    num_tokens, begin_s = 0, time.monotonic()
    while calls := [call for one in await cluster.loads() for call in one.calls]:
        if "dropped" not in {call.id for call in calls}:
            break
        num_tokens = sum(call.num_generated_tokens for call in calls if call.id == "dropped")
        await asyncio.sleep(0.05)
    assert time.monotonic() - begin_s > LEASE_S
    assert 0 < num_tokens < 24 * 900
    outputs = await reading
    assert time.monotonic() - begin_s > 1.5 * LEASE_S
    assert outputs[-1].usage.num_generated_tokens == 24 * 900


# Any: items of a handle are untyped.
async def collect(stream: Any) -> list[Any]:
    return [output async for output in stream]


async def test_no_replica_keeps_blocks_of_clients_that_left(cluster: ServeCluster) -> None:
    sampling = pb.SamplingParams(max_tokens=900, ignore_eos=True)
    async with asyncio.timeout(120.0), AsyncExitStack() as clients:
        channel = await clients.enter_async_context(grpc.aio.insecure_channel(cluster.grpc_target))
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        calls: list[Any] = []  # Any: calls of untyped stubs
        # Calls go to the replica with fewer of them.
        while not all(_has_used_blocks(one) for one in await cluster.loads()):
            request = pb.GenerateRequest(text=f"Some text {len(calls)}", sampling=sampling)
            calls.append(stub.Generate(request))
            await anext(aiter(calls[-1]))
        # Half of them cancel their calls, the others lose their connection.
        for call in calls[::2]:
            call.cancel()
    loads = await cluster.loads()
    async with asyncio.timeout(60.0):
        while any(_has_used_blocks(one) for one in loads):
            await asyncio.sleep(0.1)
            loads = await cluster.loads()
    assert len(loads) == 2
    # Ray's port has the same by the names of replicas, up to five seconds later.
    wanted = {name: float(loads[0].num_blocks) for name in cluster.replica_pids()}
    async with asyncio.timeout(60.0):
        while _free_blocks() != wanted:
            await asyncio.sleep(0.5)


def _has_used_blocks(load: ServerLoads) -> bool:
    return load.num_free_blocks < load.num_blocks


def _free_blocks() -> dict[str, float]:
    """Return the free blocks of each replica's device, as Ray's port has them."""
    url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    families = text_string_to_metric_families(httpx.get(url).text)
    return {
        one.labels["replica"]: one.value
        for family in families
        for one in family.samples
        if one.name == "ray_pagedray_free_blocks" and one.labels["pool"] == "device"
    }


@pytest.mark.parametrize("frontend", ["grpc", "http"])
async def test_cancelled_calls_leave_nothing_behind(
    cluster: ServeCluster, frontend: CancelFrontend
) -> None:
    # A tenth of those over gRPC would be lost by Serve's proxy alone.
    num_expired = len(logged(LEASE_EXPIRED))
    # Calls that would run for a long time.
    cancelled = await cancel_many(cluster, frontend=frontend, number=32, num_sequences=16)
    assert math.inf not in cancelled.gone_s
    assert math.inf not in cancelled.free_s
    assert cancelled.num_begun > 0
    # They were cancelled, not left until they or their leases ended.
    outcomes = [one["outcome"] for one in logged("call") if one["id"].startswith(f"{frontend}-")]
    assert set(outcomes) == {"cancelled"}
    assert cancelled.num_begun <= len(outcomes) <= 32
    assert len(logged(LEASE_EXPIRED)) == num_expired
