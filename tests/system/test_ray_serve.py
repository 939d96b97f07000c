"""The application on real Ray Serve: a config file, two replicas, real clients of every front."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import openai
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve
from ray.serve.schema import ServeDeploySchema

from cluster.serving.deployment import build_app
from pagedray.errors import PagedRayError, UnknownModelError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.serve_cluster import SMALL, ServeCluster
from tests.system.serve_faults import Streams, cancel_many, kill_one, redeploy, until_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

DEATH_TEXT = "The replica that served the request has ended; another try may reach another one."
PROMPT = "def read_config(path):\n"
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
CONFIG = f"""
applications:
  - name: default
    route_prefix: /
    import_path: pagedray:build_app
    args: {json.dumps(SMALL)}
    deployments:
      - name: PagedRay
        health_check_period_s: 1.0
"""


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[ServeCluster]:
    with ServeCluster() as cluster:
        cluster.deploy_config(ServeDeploySchema.model_validate(yaml.safe_load(CONFIG)))
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


def test_every_front_gives_the_same_text(
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


# The same bad request in the words of each front, and what all are to say.
REFUSALS: list[tuple[str | list[int], dict[str, Any], str]] = [  # Any: fields of all types
    ("", {}, "prompt must not be empty."),
    ([5, 9999], {}, "prompt holds the token id 9999, but ids are 0 to 3071."),
    ("x", {"max_tokens": 0}, "max_tokens must be 1 or more, not 0."),
    ("x", {"temperature": -0.1}, "temperature must be 0 to 100, not -0.1."),
    ("x", {"n": 1000}, "n must be from 1 to 128, not 1000."),
    ("x", {"stop": ["y"] * 17}, "stop may have 16 entries, not 17."),
    ("x", {"logprobs": 21}, "logprobs must be from 0 to 20, not 21."),
]


@pytest.mark.parametrize(("prompt", "sampling", "text"), REFUSALS)
def test_every_front_refuses_with_the_same_words(
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
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(message))
    assert (refused.value.code(), refused.value.details()) == (
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
    text = "The model 'other' is not served here; served is 'tiny-llama'."
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(pb.GenerateRequest(text="x", model="other")))
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, text)
    answer = httpx.post(f"{cluster.url}/v1/completions", json={"model": "other", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, text)
    with pytest.raises(UnknownModelError) as raised:
        list(cluster.handle.options(stream=True).generate.remote("x", model="other"))  # type: ignore[arg-type]  # the stubs are narrower than the library
    assert str(raised.value.cause) == text  # type: ignore[attr-defined]  # Ray puts it there


def test_what_is_no_message_is_refused(cluster: ServeCluster) -> None:
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        generate = channel.unary_stream("/pagedray.v1.GenerationService/Generate")  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
        with pytest.raises(grpc.RpcError) as refused:
            list(generate(b"\xff\xff"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as refused:
            list(generate(b"x" * (4 * 2**20 + 1)))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_deadline_reaches_the_engine(
    stub: pagedray_pb2_grpc.GenerationServiceStub,
) -> None:
    sampling = pb.SamplingParams(max_tokens=900, ignore_eos=True, n=16)
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling), timeout=0.3))
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_what_begins_alike_goes_to_one_replica(
    cluster: ServeCluster, client: openai.OpenAI
) -> None:
    before = {one.num_prompt_tokens for one in await cluster.loads()}
    for end in "abcdefgh":
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
    # One replica took all of them.
    assert after != before
    assert after & before


async def test_abort_finds_its_call_in_whatever_replica(cluster: ServeCluster) -> None:
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


async def test_cancelled_calls_end_in_their_replica(cluster: ServeCluster) -> None:
    # A tenth of them would be lost by Serve's proxy alone.
    assert max(await cancel_many(cluster, number=40)) < 5.0


async def test_a_killed_replica_ends_its_own_streams_only(cluster: ServeCluster) -> None:
    streams = Streams(cluster, num_tokens=300)
    await streams.start(16)
    calls = await kill_one(cluster)
    ended = await streams.ended()
    await streams.close()
    lost = {one.id: one.error for one in ended if one.error}
    # Streams may have ended between the look and the kill.
    assert any(set(lost) <= one for one in calls)
    assert lost
    assert set(lost.values()) <= {"UNAVAILABLE", DEATH_TEXT}
    assert {one.num_tokens for one in ended if not one.error} <= {300}
    await until_whole(cluster, 2)


async def test_a_redeploy_drops_no_stream(cluster: ServeCluster) -> None:
    streams = Streams(cluster, num_tokens=200)
    await streams.start(16)
    gone = await redeploy(cluster, streams, num_at_once=2, executor="local")
    ended = await streams.ended()
    await streams.close()
    assert len(gone) == 2
    assert {(one.num_tokens, one.error) for one in ended} == {(200, "")}
    assert len(ended) > 16


def test_a_model_that_is_not_there_is_told_in_one_line(cluster: ServeCluster) -> None:
    app = build_app({"model": "/nowhere", "executor": "local", "device": "cpu"})
    with pytest.raises(RuntimeError):
        serve.run(app, name="broken", route_prefix="/broken")
    status = serve.status().applications["broken"]
    assert status.status == "DEPLOY_FAILED"
    (deployment,) = status.deployments.values()
    assert "CheckpointError: /nowhere is not a folder" in deployment.message
    serve.delete("broken")
