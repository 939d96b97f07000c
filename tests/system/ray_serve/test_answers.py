"""Answers over every frontend of the application, and what they leave behind."""

import asyncio
import json
import time
from typing import Any

import grpc
import httpx
import openai
import pytest
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from cluster.serving.ray_serve.deployment import PagedRay, deployment_options
from cluster.serving.ray_serve.options import read_arguments
from pagedray.errors import PagedRayError, UnknownModelError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.ray_serve.application import PROMPT, logged
from tests.system.serve_cluster import SMALL, ServeCluster
from tests.system.serve_faults import kill_one, until_whole
from tests.system.span_collector import SpanCollector

pytestmark = pytest.mark.slow
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


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
    ("x", {"top_p": 1.5}, "top_p must be from 0 to 1, not 1.5."),
    ("x", {"temperature": -0.1}, "temperature must be from 0 to 100, not -0.1."),
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
        with pytest.raises(grpc.RpcError) as rejected:
            # A few hundred KiB before the proxy decompresses them.
            list(generate(b"x" * (2**26 + 1), compression=grpc.Compression.Gzip))
        assert rejected.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", ["Generate", "ListModels"])
def test_calls_without_a_message_are_rejected(cluster: ServeCluster, method: str) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        call = channel.stream_stream(f"/pagedray.v1.GenerationService/{method}")  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
        with pytest.raises(grpc.RpcError) as rejected:
            list(call(iter([]), timeout=60.0))
        assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"", None),
        (b"\n\x1dpagedray.v1.GenerationService", None),
        (b"\n\x05other", grpc.StatusCode.NOT_FOUND),
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_health_of_services(
    cluster: ServeCluster, message: bytes, code: grpc.StatusCode | None
) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
        if code is None:
            assert check(message) == b"\x08\x01"
            return
        with pytest.raises(grpc.RpcError) as rejected:
            check(message)
        assert rejected.value.code() is code


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
    assert (span["pagedray.frontend"], span["gen_ai.usage.output_tokens"]) == ("ray", "4")
    (line,) = (one for one in logged("call") if one["id"] == "traced")
    assert (line["outcome"], line["generated_tokens"]) == ("length", 4)


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
