"""The application on real Ray Serve: a config file, two replicas, real clients."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import openai
import pytest
import ray
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.schema import ServeDeploySchema

from cluster.serving.ray_serve.deployment import PagedRay, deployment_options
from cluster.serving.ray_serve.options import read_arguments
from pagedray.errors import PagedRayError, UnknownModelError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.serve_cancels import CancelFrontend, cancel_many
from tests.system.serve_cluster import SMALL, ServeCluster
from tests.system.serve_faults import (
    kill_one,
    num_differing,
    redeploy,
    stop_while_loading,
    until_whole,
)
from tests.system.serve_streams import Streams
from tests.system.span_collector import SpanCollector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.server_info import ServerLoads

pytestmark = pytest.mark.slow

PROMPT = "def read_config(path):\n"
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
LEASE_S = 6.0
LEASE_EXPIRED = "Cancelled a stream whose caller no longer renews its lease."
CONFIG = """
applications:
  - name: default
    route_prefix: /
    import_path: pagedray:build_app
    args: {arguments}
    deployments:
      - name: PagedRay
        health_check_period_s: 1.0
"""


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with SpanCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(ray_cluster: None, collector: SpanCollector) -> Iterator[ServeCluster]:
    # In float32 a greedy stream has the same tokens however often it is recomputed.
    arguments = {"log_format": "json", "otlp_endpoint": collector.url, "lease_s": LEASE_S}
    arguments |= {"dtype": "float32"}
    config = CONFIG.format(arguments=json.dumps(SMALL | arguments))
    with ServeCluster() as cluster:
        cluster.deploy_config(ServeDeploySchema.model_validate(yaml.safe_load(config)))
        yield cluster


@pytest.fixture(scope="module")
def stub(cluster: ServeCluster) -> Iterator[pagedray_pb2_grpc.GenerationServiceStub]:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        yield pagedray_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def client(cluster: ServeCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def over_grpc(stub: pagedray_pb2_grpc.GenerationServiceStub) -> str:
    request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(**GREEDY))  # type: ignore[arg-type]  # the stubs are narrower than the library
    answers = list(stub.Generate(request, timeout=60.0))
    assert answers[0].HasField("prompt_info")
    assert answers[-1].usage.num_generated_tokens == 24
    return "".join(sequence.text for answer in answers for sequence in answer.sequences)


def over_http(client: openai.OpenAI) -> str:
    stream = client.completions.create(
        model="tiny-llama",
        prompt=PROMPT,
        temperature=0.0,
        max_tokens=24,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def over_handle(cluster: ServeCluster) -> str:
    outputs = list(cluster.handle.options(stream=True).generate.remote(PROMPT, GREEDY))  # type: ignore[arg-type]  # the stubs are narrower than the library
    assert outputs[-1].is_last
    return "".join(sequence.text for output in outputs for sequence in output.sequences)


def test_every_frontend_gives_the_same_text(
    cluster: ServeCluster,
    stub: pagedray_pb2_grpc.GenerationServiceStub,
    client: openai.OpenAI,
) -> None:
    text = over_grpc(stub)
    assert text
    assert over_http(client) == text
    assert over_handle(cluster) == text


def test_chat_and_the_smaller_methods(
    cluster: ServeCluster,
    stub: pagedray_pb2_grpc.GenerationServiceStub,
    client: openai.OpenAI,
) -> None:
    (model,) = stub.ListModels(pb.ListModelsRequest()).models
    assert [model.name] == [one.id for one in client.models.list()] == ["tiny-llama"]
    token_ids = stub.Tokenize(pb.TokenizeRequest(text=PROMPT)).token_ids
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids)).text == PROMPT
    assert stub.GetServerInfo(pb.GetServerInfoRequest()).num_blocks == SMALL["num_blocks"]
    assert stub.GetLoads(pb.GetLoadsRequest()).num_blocks == SMALL["num_blocks"]
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


# The same bad request for each frontend, and the expected message.
REJECTIONS: list[tuple[str | list[int], dict[str, Any], str]] = [  # Any: fields of all types
    ("", {}, "prompt must not be empty."),
    ([5, 9999], {}, "prompt contains token id 9999, but ids are 0 to 3071."),
    ("x", {"top_p": 1.5}, "top_p must be 0 to 1, not 1.5."),
    ("x", {"temperature": -0.1}, "temperature must be 0 to 100, not -0.1."),
    ("x", {"n": 1000}, "n must be from 1 to 128, not 1000."),
    ("x", {"stop": ["y"] * 17}, "stop may have at most 16 entries, not 17."),
    ("x", {"logprobs": 21}, "logprobs must be from 0 to 20, not 21."),
]


@pytest.mark.parametrize(("prompt", "sampling", "text"), REJECTIONS)
def test_every_frontend_rejects_with_the_same_words(
    cluster: ServeCluster,
    stub: pagedray_pb2_grpc.GenerationServiceStub,
    prompt: str | list[int],
    sampling: dict[str, Any],  # Any: fields of all types
    text: str,
) -> None:
    message = pb.GenerateRequest(sampling=pb.SamplingParams(**sampling))
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    with pytest.raises(grpc.RpcError) as rejected:
        list(stub.Generate(message))
    assert (rejected.value.code(), rejected.value.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        text,
    )
    body = {"model": "tiny-llama", "prompt": prompt, **sampling}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, text)
    with pytest.raises(PagedRayError) as raised:
        list(cluster.handle.options(stream=True).generate.remote(prompt, sampling))  # type: ignore[arg-type]  # the stubs are narrower than the library
    assert str(raised.value.cause) == text  # type: ignore[attr-defined]  # Ray puts it there


def test_an_unknown_model_is_not_found(
    cluster: ServeCluster, stub: pagedray_pb2_grpc.GenerationServiceStub
) -> None:
    text = "The model 'other' does not exist; this server serves 'tiny-llama'."
    with pytest.raises(grpc.RpcError) as rejected:
        list(stub.Generate(pb.GenerateRequest(text="x", model="other")))
    assert (rejected.value.code(), rejected.value.details()) == (grpc.StatusCode.NOT_FOUND, text)
    answer = httpx.post(f"{cluster.url}/v1/completions", json={"model": "other", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, text)
    with pytest.raises(UnknownModelError) as raised:
        list(cluster.handle.options(stream=True).generate.remote("x", model="other"))  # type: ignore[arg-type]  # the stubs are narrower than the library
    assert str(raised.value.cause) == text  # type: ignore[attr-defined]  # Ray puts it there


def test_malformed_messages_are_rejected(cluster: ServeCluster) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        generate = channel.unary_stream("/pagedray.v1.GenerationService/Generate")  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
        with pytest.raises(grpc.RpcError) as rejected:
            list(generate(b"\xff\xff"))
        assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as rejected:
            list(generate(b"x" * (4 * 2**20 + 1)))
        assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_deadline_reaches_the_engine(
    stub: pagedray_pb2_grpc.GenerationServiceStub,
) -> None:
    sampling = pb.SamplingParams(max_tokens=900, ignore_eos=True, n=16)
    with pytest.raises(grpc.RpcError) as rejected:
        list(stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling), timeout=0.3))
    assert rejected.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_prompts_with_a_common_prefix_go_to_one_replica(
    cluster: ServeCluster, client: openai.OpenAI
) -> None:
    await cluster.until_idle()
    # The proxy learns of that up to a second later, and may send prompts elsewhere until then.
    for _ in range(5):
        before = {one.num_prompt_tokens for one in await cluster.loads()}
        for end in "abcdefghijkl":
            client.chat.completions.create(
                model="tiny-llama",
                messages=[
                    {"role": "user", "content": "Hello"},
                    {"role": "assistant", "content": "Hi."},
                    {"role": "user", "content": end},
                ],
                max_tokens=1,
            )
        after = {one.num_prompt_tokens for one in await cluster.loads()}
        assert after != before
        if after & before:
            break
    assert after & before, "One replica must have served all prompts."


def kept_on_both(client: openai.OpenAI) -> dict[str, str]:
    """Return the id of a response of each replica, by the replica's name in it."""
    kept: dict[str, str] = {}
    for number in range(64):
        made = client.responses.create(
            model="tiny-llama",
            input="Hello",
            max_output_tokens=4,
            extra_headers={"X-Session-Id": f"session {number}"},
        )
        kept[made.id.split("_")[1]] = made.id
        if len(kept) == 2:
            return kept
    raise AssertionError("All sessions went to one replica.")


def test_responses_are_found_on_any_replica(cluster: ServeCluster, client: openai.OpenAI) -> None:
    names = {one.split("#")[-1] for one in cluster.replica_pids()}
    kept = kept_on_both(client)
    assert kept.keys() == names
    for name, response_id in kept.items():
        continued = {
            client.responses.create(
                model="tiny-llama",
                input="Go on.",
                previous_response_id=response_id,
                max_output_tokens=4,
                extra_headers={"X-Session-Id": f"replica-{other}"},
            ).id.split("_")[1]
            for other in names
        }
        assert continued == names
        # Without a session it goes where it is kept, unless the load is uneven.
        other = client.responses.create(
            model="tiny-llama", input="And?", previous_response_id=response_id, max_output_tokens=4
        )
        assert other.usage is not None
        assert other.usage.input_tokens > 10
        for _ in range(4):
            assert client.responses.retrieve(response_id).id == response_id
        client.responses.delete(response_id)
        for _ in range(4):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response_id)
        assert name in names


async def test_responses_of_a_replica_that_died_are_rejected(
    cluster: ServeCluster, client: openai.OpenAI
) -> None:
    kept = kept_on_both(client)
    killed = next(iter(cluster.replica_pids()))
    lost = killed.split("#")[-1]
    await kill_one(cluster)
    for name, response_id in kept.items():
        given = {"model": "tiny-llama", "input": "Go on.", "previous_response_id": response_id}
        answer = httpx.post(f"{cluster.url}/v1/responses", json=given, timeout=60.0)
        if name != lost:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "previous_response_not_found"
        assert "has ended" in answer.json()["error"]["message"]
    while killed in cluster.replica_pids():
        await asyncio.sleep(0.2)
    await until_whole(cluster, 2)


async def test_abort_finds_its_call_on_any_replica(cluster: ServeCluster) -> None:
    async with grpc.aio.insecure_channel(cluster.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        sampling = pb.SamplingParams(max_tokens=900, ignore_eos=True)
        names = ("first", "second", "third")
        streams = [
            aiter(stub.Generate(pb.GenerateRequest(request_id=one, text=one, sampling=sampling)))
            for one in names
        ]
        for stream in streams:
            await anext(stream)
        await stub.Abort(pb.AbortRequest(request_ids=names))
        for stream in streams:
            sequences = [one async for answer in stream for one in answer.sequences]
            assert sequences[-1].finish_reason == pb.FINISH_REASON_ABORTED


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


# Any: items of a handle are untyped.
async def collect(stream: Any) -> list[Any]:
    return [output async for output in stream]


def test_metrics_of_replicas_are_on_rays_port(cluster: ServeCluster) -> None:
    over_handle(cluster)
    loads = asyncio.run(cluster.loads())
    wanted = {float(one.num_generated_tokens) for one in loads}
    url = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    deadline_s = time.monotonic() + 60.0
    while True:
        families = text_string_to_metric_families(httpx.get(url).text)
        samples = [one for family in families for one in family.samples]
        found = {
            one.labels["replica"]: one.value
            for one in samples
            if one.name == "ray_pagedray_generated_tokens_total"
        }
        if set(found.values()) == wanted:
            break
        assert time.monotonic() < deadline_s, f"{found}, not {wanted}"
        time.sleep(0.5)
    assert set(found) == set(cluster.replica_pids())
    buckets = "ray_pagedray_request_duration_seconds_bucket"
    assert any(one.name == buckets and one.value > 0 for one in samples)


def test_a_call_leaves_a_span_and_a_line(cluster: ServeCluster, collector: SpanCollector) -> None:
    sampling = {"max_tokens": 4, "ignore_eos": True}
    list(cluster.handle.options(stream=True).generate.remote("x", sampling, request_id="traced"))  # type: ignore[arg-type]  # the stubs are narrower than the library
    span = collector.span_with("gen_ai.response.id", "traced", timeout_s=30.0)
    assert (span["pagedray.front"], span["gen_ai.usage.output_tokens"]) == ("ray", "4")
    (line,) = (one for one in logged("call") if one["id"] == "traced")
    assert (line["outcome"], line["generated_tokens"]) == ("length", 4)


# Any: fields of all types.
def logged(message: str) -> list[dict[str, Any]]:
    """Return the lines of a message in the logs of all replicas."""
    node: Any = ray._private.worker._global_node  # Any: Ray's own
    lines = (
        json.loads(line)
        for path in Path(node.get_logs_dir_path()).glob("worker-*.err")
        for line in path.read_text().splitlines()
        if line.startswith("{")
    )
    return [one for one in lines if one["message"] == message]


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


def text_of(outputs: list[Any]) -> str:  # Any: items of a handle are untyped
    assert [one.is_last for one in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].usage.num_generated_tokens == 300
    return "".join(one.text for output in outputs for one in output.sequences)


async def test_serves_time_limit_ends_a_stream_with_an_error(cluster: ServeCluster) -> None:
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 900, "n": 24, "stream": True}
    answer = httpx.post(
        f"{cluster.url}/v1/completions",
        json=body | {"ignore_eos": True},
        headers={"x-request-timeout-seconds": "2", "x-request-id": "limited"},
        timeout=60.0,
    )
    *_, error, done, _ = answer.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "timeout_error"
    assert done == "data: [DONE]"
    while any(one.calls for one in await cluster.loads()):
        await asyncio.sleep(0.05)
    # It does not begin again on the other replica.
    assert [one["outcome"] for one in logged("call") if one["id"] == "limited"] == ["cancelled"]


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


def test_a_missing_model_is_reported_in_one_line(cluster: ServeCluster) -> None:
    arguments = read_arguments({"model": "/nowhere", "executor": "local", "device": "cpu"})
    # The running replicas use all CPUs.
    options = deployment_options(arguments) | {"ray_actor_options": {"num_cpus": 0}}
    app = serve.deployment(PagedRay, **options).bind(arguments)  # type: ignore[attr-defined]  # Serve's decorator
    with pytest.raises(RuntimeError):
        serve.run(app, name="broken", route_prefix="/broken")
    status = serve.status().applications["broken"]
    assert status.status == "DEPLOY_FAILED"
    (deployment,) = status.deployments.values()
    assert "CheckpointError: /nowhere is not a folder" in deployment.message
    serve.delete("broken")


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


async def test_an_application_without_replicas_starts_one_for_a_request(
    cluster: ServeCluster,
) -> None:
    policy = {
        "policy_function": "cluster.serving.ray_serve.autoscaling:TokensPolicy",
        "policy_kwargs": {"target_kv_use": 0.7, "target_tokens": None},
    }
    arguments = SMALL | {"executor": "local", "max_replicas": 2}
    config = yaml.safe_load(CONFIG.format(arguments=json.dumps(arguments)))
    config["applications"][0]["deployments"][0]["autoscaling_config"] = {
        "min_replicas": 0,
        "max_replicas": 2,
        "downscale_delay_s": 0.0,
        "policy": policy,
    }
    cluster.deploy_config(ServeDeploySchema.model_validate(config))
    await until_whole(cluster, 0)
    body = {"model": "tiny-llama", "prompt": PROMPT, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=300.0) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for _ in range(4))
        )
    assert [one.status_code for one in answers] == [200] * 4
