"""Replicas and proxies of the application that end, hang or are replaced."""

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest
import ray
from ray.serve.schema import ServeDeploySchema

from tests.system.ray_serve.application import PROMPT, serve_config
from tests.system.serve_clients import Streams
from tests.system.serve_cluster import SMALL, ServeCluster
from tests.system.serve_faults import (
    kill_one,
    num_differing,
    redeploy,
    stop_while_loading,
    until_whole,
)

pytestmark = pytest.mark.slow


async def test_calls_of_a_killed_replica_continue_on_the_other(cluster: ServeCluster) -> None:
    streams = Streams(cluster, num_tokens=300, temperature=0.0)
    await streams.start(16)
    calls = await kill_one(cluster)
    ended = await streams.ended()
    await streams.close()
    assert all(calls)
    assert {(one.num_tokens, one.is_complete, one.error) for one in ended} == {(300, True, "")}
    await until_whole(cluster, 2)
    assert await num_differing(cluster, ended, 300) == 0


async def test_streams_of_a_killed_proxy_end_and_another_one_serves(cluster: ServeCluster) -> None:
    streams = Streams(cluster, num_tokens=900)
    await streams.start(8)
    ray.kill(cluster.proxy())
    ended = await streams.ended()
    await streams.close()
    assert {one.error for one in ended} == {"UNAVAILABLE", "Connection error."}
    await cluster.until_proxied()
    after = Streams(cluster, num_tokens=8, name="after")
    await after.start(8)
    assert {(one.num_tokens, one.is_complete, one.error) for one in await after.ended()} == {
        (8, True, "")
    }
    await after.close()
    # The leases of the calls have expired.
    await cluster.until_idle()


async def test_a_proxy_that_drains_finishes_its_streams(cluster: ServeCluster) -> None:
    proxy = cluster.proxy()
    streams = Streams(cluster, num_tokens=300)
    late = Streams(cluster, num_tokens=8, name="late")
    await streams.start(8)
    await proxy.update_draining.remote(True)
    try:
        # So load balancers send no more calls.
        assert httpx.get(f"{cluster.url}/-/healthz").status_code == 503
        assert not await proxy.is_drained.remote()
        await late.start(8)
        ended = [*await streams.ended(), *await late.ended()]
    finally:
        await proxy.update_draining.remote(False)
    await streams.close()
    await late.close()
    assert {(one.is_complete, one.error) for one in ended} == {(True, "")}
    assert httpx.get(f"{cluster.url}/-/healthz").status_code == 200


async def test_calls_of_a_replica_that_hangs_continue_on_the_other(cluster: ServeCluster) -> None:
    streams = Streams(cluster, num_tokens=300, temperature=0.0)
    late = Streams(cluster, num_tokens=8, name="late")
    await streams.start(16)
    pid = next(iter(cluster.replica_pids().values()))
    os.kill(pid, signal.SIGSTOP)
    try:
        # Some of these wait for it too, until the other one gets them.
        await asyncio.wait_for(late.start(8), 60.0)
        ended = await asyncio.wait_for(streams.ended(), 60.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    late_ended = await late.ended()
    await streams.close()
    await late.close()
    assert {(one.num_tokens, one.is_complete, one.error) for one in ended} == {(300, True, "")}
    assert {(one.num_tokens, one.is_complete, one.error) for one in late_ended} == {(8, True, "")}
    await until_whole(cluster, 2)
    assert await num_differing(cluster, ended, 300) == 0


async def test_streams_of_handles_continue_on_the_other_replica(cluster: ServeCluster) -> None:
    def read(name: str) -> list[Any]:  # Any: items of a handle are untyped
        return list(generate.remote(name, sampling))

    sampling = {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True}
    generate: Any = cluster.handle.options(stream=True).generate  # Any: untyped
    names = [f"prompt {number}" for number in range(8)]
    undisturbed = [text_of(await collect(generate.remote(one, sampling))) for one in names]
    reading = [asyncio.create_task(collect(generate.remote(one, sampling))) for one in names]
    in_threads = [asyncio.create_task(asyncio.to_thread(read, one)) for one in names]
    while not all(len(one.calls) > 1 for one in await cluster.loads()):
        await asyncio.sleep(0.01)
    await kill_one(cluster)
    found = [text_of(one) for one in await asyncio.gather(*reading, *in_threads)]
    assert found == undisturbed * 2
    await until_whole(cluster, 2)


# Any: items of a handle are untyped.
async def collect(stream: Any) -> list[Any]:
    return [output async for output in stream]


def text_of(outputs: list[Any]) -> str:  # Any: items of a handle are untyped
    assert [one.is_last for one in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].usage.num_generated_tokens == 300
    return "".join(one.text for output in outputs for one in output.sequences)


async def test_a_replica_that_hangs_while_it_loads_is_replaced(cluster: ServeCluster) -> None:
    streams = Streams(cluster, num_tokens=300, temperature=0.0)
    await streams.start(8)
    await kill_one(cluster)
    loading = await stop_while_loading(cluster)
    ended = await streams.ended()
    await streams.close()
    assert {(one.num_tokens, one.is_complete, one.error) for one in ended} == {(300, True, "")}
    assert httpx.get(f"{cluster.url}/ready", timeout=10.0).status_code == 200
    await until_whole(cluster, 2)
    assert loading.pid not in cluster.replica_pids().values()


async def test_a_redeploy_drops_no_stream_and_abort_reaches_those_it_drains(
    cluster: ServeCluster,
) -> None:
    kept = Streams(cluster, num_tokens=200)
    aborted = Streams(cluster, num_tokens=900, name="aborted")
    await aborted.start(8)
    assert all(one.calls for one in await cluster.loads())
    await kept.start(16)
    change = asyncio.create_task(redeploy(cluster, kept, num_at_once=2, executor="local"))
    while not cluster.replica_pids("STOPPING"):
        assert not change.done()
        await asyncio.sleep(0.1)
    # Serve has no record of the draining replica.
    assert len(await cluster.loads()) < 2
    await aborted.abort([f"aborted-{index}" for index in range(8)])
    ended = await aborted.ended()
    assert {one.error for one in ended} == {""}
    assert max(one.num_tokens for one in ended) < 900
    gone = await change
    ended = await kept.ended()
    await kept.close()
    await aborted.close()
    assert len(gone) == 2
    assert {(one.num_tokens, one.error) for one in ended} == {(200, "")}
    assert len(ended) > 16


async def test_another_number_of_replicas_keeps_those_that_run(cluster: ServeCluster) -> None:
    numbers = [{"num_replicas": number} for number in (1, 2, 1)]
    replicas = await _replicas_of(cluster, numbers, [1, 2, 1])
    assert replicas[0] < replicas[1]
    assert replicas[2] < replicas[1]


async def test_another_range_of_replicas_keeps_those_that_run(cluster: ServeCluster) -> None:
    ranges = [_autoscaling(1, 1), _autoscaling(2, 3), _autoscaling(1, 2)]
    replicas = await _replicas_of(cluster, ranges, [1, 2, 1])
    assert replicas[0] < replicas[1]
    assert replicas[2] < replicas[1]


# Any: options of Ray Serve.
async def _replicas_of(
    cluster: ServeCluster, deployments: list[dict[str, Any]], expected: list[int]
) -> list[set[str]]:
    """Deploy one after the other while streams run; return the replicas of each."""
    config = serve_config(SMALL | {"executor": "local"})
    [deployment] = config["applications"][0]["deployments"]
    streams = Streams(cluster, num_tokens=300)
    replicas = []
    for options, number in zip(deployments, expected, strict=True):
        config["applications"][0]["deployments"] = [deployment | options]
        cluster.deploy_config(ServeDeploySchema.model_validate(config))
        await until_whole(cluster, number)
        await streams.start(8)
        replicas.append(set(cluster.replica_pids()))
    ended = await streams.ended()
    await streams.close()
    assert {(one.num_tokens, one.error) for one in ended} == {(300, "")}
    return replicas


# Any: options of Ray Serve.
def _autoscaling(num_least: int, num_most: int) -> dict[str, Any]:
    policy = {
        "policy_function": "cluster.serving.ray_serve.autoscaling:TokensPolicy",
        "policy_kwargs": {"target_kv_use": 0.7, "target_tokens": None},
    }
    return {
        "autoscaling_config": {
            "min_replicas": num_least,
            "max_replicas": num_most,
            "downscale_delay_s": 0.0,
            "policy": policy,
        }
    }


async def test_an_application_without_replicas_starts_one_for_a_request(
    cluster: ServeCluster,
) -> None:
    config = serve_config(SMALL | {"executor": "local"})
    config["applications"][0]["deployments"][0] |= _autoscaling(0, 2)
    cluster.deploy_config(ServeDeploySchema.model_validate(config))
    await until_whole(cluster, 0)
    body = {"model": "tiny-llama", "prompt": PROMPT, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=300.0) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for _ in range(4))
        )
    assert [one.status_code for one in answers] == [200] * 4
