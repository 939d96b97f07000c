"""A stream that is cut anywhere and continues in another replica is the stream of one replica."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, get_args

import grpc
import pytest

from cluster.serving.auth import ANONYMOUS
from cluster.serving.ray_serve.replica_calls import ReplicaDiedError
from pagedray.errors import EngineError
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.conftest import TEXT
from tests.serving.openai.test_tools import ASK, AUTO, TEMPLATE, TOOLS
from tests.serving.ray_serve.failing_replicas import (
    FailingReplicas,
    Failure,
    Replica,
    reset,
    some_cuts,
)
from tests.serving.ray_serve.proxied_clients import over_grpc, over_http, over_unary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.request import Request
    from tests.serving.ray_serve.proxied_clients import Context


def error_of(received: list[Any]) -> dict[str, Any]:  # Any: ASGI messages, JSON
    """Return the error that ends a stream of events."""
    assert not received[-1].get("more_body", False)
    events = b"".join(one["body"] for one in received[1:]).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    error: dict[str, Any] = json.loads(events[-3].removeprefix("data: "))["error"]  # Any: JSON
    return error


def read_grpc(context: Context, kind: Any) -> dict[str, Any]:  # Any: a message class
    """Return what the messages of a complete stream say together, each thing once."""
    messages = [kind.FromString(body) for body in context.written]
    assert [one.HasField("prompt_info") for one in messages] == [True] + [False] * (
        len(messages) - 1
    )
    assert [one.HasField("usage") for one in messages] == [False] * (len(messages) - 1) + [True]
    sequences: dict[int, dict[str, Any]] = {}  # Any: see above
    for one in (one for message in messages for one in message.sequences):
        found = sequences.setdefault(
            one.index, {"text": "", "ids": [], "logprobs": [], "end": None, "calls": {}}
        )
        assert found["end"] is None
        found["text"] += one.content if kind is pb.ChatResponse else one.text
        found["ids"] += one.token_ids
        found["logprobs"] += [str(logprobs) for logprobs in one.logprobs]
        for call in getattr(one, "tool_calls", ()):
            _add_call(found["calls"], call.index, call.id, call.name, call.arguments)
        if one.finish_reason:
            found["end"] = (one.finish_reason, one.stop_reason)
    assert all(one["end"] for one in sequences.values())
    return {
        "sequences": sequences,
        "ids": len({one.request_id for one in messages}),
        "prompt": str(messages[0].prompt_info),
        "usage": str(messages[-1].usage),
    }


def read_http(received: list[Any]) -> dict[str, Any]:  # Any: ASGI messages, JSON
    """Return what the events of a complete stream say together, each thing once."""
    assert [one["type"] for one in received].count("http.response.start") == 1
    assert [one.get("more_body", False) for one in received[1:]] == [True] * (len(received) - 2) + [
        False
    ]
    assert all(set(one) <= {"type", "body", "more_body"} for one in received[1:])
    events = b"".join(one["body"] for one in received[1:]).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(one.removeprefix("data: ")) for one in events[:-2]]
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found = choices.setdefault(
            choice["index"], {"text": "", "logprobs": [], "end": None, "calls": {}, "roles": 0}
        )
        assert found["end"] is None
        delta = choice.get("delta", {})
        found["text"] += choice.get("text", "") + (delta.get("content") or "")
        found["roles"] += "role" in delta
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            _add_call(
                found["calls"],
                call["index"],
                call.get("id", ""),
                function.get("name", ""),
                function["arguments"],
            )
        logprobs = choice["logprobs"]
        if logprobs:
            parts = logprobs.get("content")
            parts = parts or list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
            found["logprobs"] += parts
        if choice["finish_reason"]:
            found["end"] = (choice["finish_reason"], choice["stop_reason"])
    assert all(one["end"] for one in choices.values())
    return {
        "choices": choices,
        "heads": len({(chunk["id"], chunk["created"]) for chunk in chunks}),
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
    }


def _add_call(calls: dict[int, Any], index: int, id_: str, name: str, arguments: str) -> None:
    found = calls.setdefault(index, {"ids": 0, "name": name, "arguments": ""})
    found["ids"] += bool(id_)
    found["arguments"] += arguments


def read_events(received: list[Any]) -> list[Any]:  # Any: ASGI messages, JSON
    """Return the events of a stream whose events have names."""
    events = b"".join(one["body"] for one in received[1:]).decode().split("\n\n")
    assert events[-1] == ""
    return [json.loads(one.partition("\ndata: ")[2]) for one in events[:-1]]


def read_responses(events: list[Any]) -> list[Any]:  # Any: JSON
    """Return the items that a stream of Responses builds up, each with its text."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    items: list[dict[str, Any]] = []  # Any: JSON
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({**event["item"], "arguments": "", "text": ""})
        elif event["type"].endswith(".delta"):
            is_call = event["type"].startswith("response.function_call")
            items[event["output_index"]]["arguments" if is_call else "text"] += event["delta"]
    names = "type", "id", "call_id", "name"
    shown = [[item.get(name) for name in names] for item in items]
    final = events[-1]["response"]["output"]
    # A client may answer the calls of the stream, and others those of the last event.
    assert [[item.get(name) for name in names] for item in final] == shown
    return [(item["type"], item.get("name"), item["arguments"], item["text"]) for item in items]


def read_messages(events: list[Any]) -> list[Any]:  # Any: JSON
    """Return the blocks that a stream of Messages builds up."""
    assert [event["type"] for event in events].count("message_start") == 1
    blocks: list[list[str]] = []
    num_ended = 0
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) == num_ended
            block = event["content_block"]
            blocks.append([block["type"], block.get("name", ""), ""])
        elif event["type"] == "content_block_delta":
            assert event["index"] == num_ended
            delta = event["delta"]
            assert delta["type"] == (
                "text_delta" if blocks[-1][0] == "text" else "input_json_delta"
            )
            blocks[-1][2] += delta.get("text", "") + delta.get("partial_json", "")
        elif event["type"] == "content_block_stop":
            num_ended += 1
    assert num_ended == len(blocks)
    return blocks


EOS = 1
NUM_RUNS = 8
GENERATIONS: dict[str, dict[str, Any]] = {  # Any: fields of several types
    "plain": {"max_tokens": 30, "ignore_eos": True},
    "several": {"max_tokens": 30, "ignore_eos": True, "n": 3},
    "logprobs": {"max_tokens": 30, "ignore_eos": True, "n": 2, "logprobs": 2},
    "stop": {"stop": ["says h\u00e9llo \u4f60", "zz"], "n": 2, "min_tokens": 3},
    "end of text": {"max_tokens": 200},
    "prompt": {"max_tokens": 30, "ignore_eos": True, "n": 2, "prompt_logprobs": 1},
    "stop token": {"stop_token_ids": [104], "include_stop": True},
}
BODIES: dict[str, dict[str, Any]] = {  # Any: fields of several types
    "completion": {"prompt": "hello", "max_tokens": 30, "ignore_eos": True},
    "prompts": {"prompt": ["hello", "you"], "n": 2, "max_tokens": 20, "logprobs": 1},
    "stop": {"prompt": "hello", "stop": ["says h\u00e9llo \u4f60"], "n": 2},
    "chat": {"messages": ASK, "max_tokens": 30, "n": 2, "logprobs": True, "top_logprobs": 1},
    "tools": {"messages": ASK, "tools": TOOLS, "n": 2, "max_tokens": 200},
}


@pytest.fixture(scope="module")
def tool_tokenizer(template_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    return template_tokenizer(TEMPLATE)


@pytest.fixture
async def replicas(tool_tokenizer: Tokenizer) -> AsyncIterator[list[Replica]]:
    def script(request: Request, index: int) -> list[int]:
        """Return tokens that depend on the seed, as sampled ones do."""
        is_chat = len(request.prompt_token_ids) > 20
        words = (AUTO if is_chat else TEXT).split(" ")
        if not is_chat:
            turn = random.Random(f"{request.seed} {index}").randrange(len(words))
            words = words[turn:] + words[:turn]
        return [*tool_tokenizer.encode(" ".join(words), add_special_tokens=False), EOS]

    found = [Replica(tool_tokenizer, script) for _ in range(4)]
    yield found
    for one in found:
        await one.close()


@pytest.fixture
def serve(replicas: list[Replica]) -> FailingReplicas:
    return FailingReplicas(replicas)


STREAMED = {
    "model": "tiny",
    "prompt": "hello",
    "max_tokens": 90,
    "ignore_eos": True,
    "stream": True,
}


@pytest.mark.parametrize("sampling", GENERATIONS.values(), ids=GENERATIONS.keys())
async def test_a_cut_generate_stream_is_equal(
    serve: FailingReplicas, replicas: list[Replica], sampling: dict[str, Any]
) -> None:
    request = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(seed=7, **sampling))
    whole = read_grpc(await over_grpc(serve, "Generate", request), pb.GenerateResponse)
    chance = random.Random(1)
    for _ in range(NUM_RUNS):
        reset(replicas)
        serve.cuts = some_cuts(chance, 20)
        context = await over_grpc(serve, "Generate", request)
        assert context.code is grpc.StatusCode.OK
        assert read_grpc(context, pb.GenerateResponse) == whole


async def test_a_cut_chat_stream_with_tools_is_equal(
    serve: FailingReplicas, replicas: list[Replica]
) -> None:
    tool = pb.Tool(name="weather", parameters='{"type": "object"}')
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="How is it?")],
        tools=[tool, pb.Tool(name="time")],
        sampling=pb.SamplingParams(n=2, max_tokens=200),
    )
    whole = read_grpc(await over_grpc(serve, "Chat", request), pb.ChatResponse)
    assert all(len(one["calls"]) == 2 for one in whole["sequences"].values())
    chance = random.Random(2)
    for _ in range(NUM_RUNS):
        reset(replicas)
        serve.cuts = some_cuts(chance, 40)
        context = await over_grpc(serve, "Chat", request)
        assert read_grpc(context, pb.ChatResponse) == whole


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_a_cut_event_stream_is_equal(
    serve: FailingReplicas, replicas: list[Replica], body: dict[str, Any]
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    options = {"stream": True, "stream_options": {"include_usage": True}, "seed": 7}
    body = {"model": "tiny", **options, **body}
    whole = read_http(await over_http(serve, path, body))
    chance = random.Random(3)
    for _ in range(NUM_RUNS):
        reset(replicas)
        serve.cuts = some_cuts(chance, 25)
        assert read_http(await over_http(serve, path, body)) == whole


async def test_each_beam_arrives_once(serve: FailingReplicas, replicas: list[Replica]) -> None:
    beams = {
        "prompt": ["hello", "you"],
        "n": 3,
        "max_tokens": 4,
        "use_beam_search": True,
        "seed": 7,
    }
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **beams}
    whole = read_http(await over_http(serve, "/v1/completions", body))
    assert len(whole["choices"]) == 6
    for cut in range(6):
        reset(replicas)
        serve.cuts = [(cut, "died")]
        assert read_http(await over_http(serve, "/v1/completions", body)) == whole


ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {  # Any: fields of several types
    "responses": (
        "/v1/responses",
        {
            "input": ASK,
            "max_output_tokens": 200,
            "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS],
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": ASK,
            "max_tokens": 200,
            "tools": [{"name": name, "input_schema": {}} for name in ("weather", "time")],
        },
    ),
}


@pytest.mark.parametrize("api", ANSWERS)
async def test_a_cut_stream_of_named_events_is_equal(
    serve: FailingReplicas, replicas: list[Replica], tool_tokenizer: Tokenizer, api: str
) -> None:
    path, body = ANSWERS[api]
    body = {"model": "tiny", "stream": True, **body}
    read = read_responses if api == "responses" else read_messages
    turn = tool_tokenizer.encode(f"{AUTO} So it is.", add_special_tokens=False)
    for one in replicas:
        one.engine.script = lambda request, index: [*turn, EOS]
    whole = read(read_events(await over_http(serve, path, body)))
    assert len(whole) == 4
    chance = random.Random(4)
    for _ in range(NUM_RUNS):
        serve.cuts = some_cuts(chance, 90)
        assert read(read_events(await over_http(serve, path, body))) == whole


async def test_a_call_without_a_seed_keeps_the_one_it_began_with(
    serve: FailingReplicas, replicas: list[Replica]
) -> None:
    sampling = pb.SamplingParams(max_tokens=30, ignore_eos=True, n=2)
    for cut in (0, 1, 5):
        reset(replicas)
        serve.cuts = [(cut, "died")]
        context = await over_grpc(
            serve, "Generate", pb.GenerateRequest(text="x", sampling=sampling)
        )
        requests = [one for replica in replicas for one in replica.engine.log.submitted]
        assert len(requests) == 2
        assert len({one.seed for one in requests}) == 1
        ids = [one["ids"] for one in read_grpc(context, pb.GenerateResponse)["sequences"].values()]
        scripts = [replicas[0].engine.script(requests[0], index) for index in range(2)]
        assert sorted(ids) == sorted((one * 2)[:30] for one in scripts)


LONG = {"model": "tiny", "prompt": "hello", "seed": 7, "user": "x" * 300_000}


@pytest.mark.parametrize(
    ("body", "num_lost", "num_sent"),
    [(STREAMED, 4, 1), (LONG, 2, 3)],
    ids=["carried with its scope", "sent again"],
)
async def test_a_body_that_serve_loses_is_not_missed(
    serve: FailingReplicas,
    replicas: list[Replica],
    body: dict[str, Any],
    num_lost: int,
    num_sent: int,
) -> None:
    for one in replicas:
        one.http.read_timeout_s = 0.1
    serve.num_lost_bodies = num_lost
    received = await over_http(serve, "/v1/completions", body)
    assert received[0]["status"] == 200
    assert serve.num_sent == num_sent


async def test_a_body_that_its_client_does_not_end_is_sent_once(
    serve: FailingReplicas, replicas: list[Replica]
) -> None:
    for one in replicas:
        one.http.read_timeout_s = 0.1
    received = await over_http(serve, "/v1/completions", LONG, is_whole=False)
    assert (received[0]["status"], serve.num_sent) == (408, 1)


@pytest.mark.parametrize("failure", get_args(Failure))
@pytest.mark.parametrize("cut", [0, 1, 4])
async def test_without_another_replica_a_stream_ends_with_an_error(
    replicas: list[Replica], failure: Failure, cut: int
) -> None:
    serve = FailingReplicas(replicas, may_continue=False)
    for one in replicas:
        one.engine.step_s = 0.003
    serve.cuts = [(cut, failure)]
    sampling = pb.SamplingParams(max_tokens=90, ignore_eos=True)
    context = await over_grpc(serve, "Generate", pb.GenerateRequest(text="x", sampling=sampling))
    assert context.code is grpc.StatusCode.UNAVAILABLE
    assert "trace" not in context.details
    reset(replicas)
    serve.cuts = [(cut, failure)]
    body = {"model": "tiny", "prompt": "x", "max_tokens": 90, "ignore_eos": True, "stream": True}
    received = await over_http(serve, "/v1/completions", body)
    if received[0]["status"] == 200:
        assert error_of(received)["message"]
    else:
        assert received[0]["status"] == 503
    assert not received[-1].get("more_body", False)


async def test_a_call_continues_three_times_at_most(serve: FailingReplicas) -> None:
    serve.cuts = [(2, "died")] * 5
    sampling = pb.SamplingParams(max_tokens=200, ignore_eos=True)
    context = await over_grpc(serve, "Generate", pb.GenerateRequest(text="x", sampling=sampling))
    assert (context.code, context.details) == (
        grpc.StatusCode.UNAVAILABLE,
        str(ReplicaDiedError()),
    )
    assert serve.num_sent == 4


async def test_what_is_not_streamed_is_sent_again(serve: FailingReplicas) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "ignore_eos": True, "seed": 3}
    whole = await over_http(serve, "/v1/completions", body)
    for cut in (0, 1):
        serve.cuts = [(cut, "died"), (cut, "hung")]
        again = await over_http(serve, "/v1/completions", body)
        texts = [json.loads(one[1]["body"])["choices"] for one in (whole, again)]
        assert texts[0] == texts[1]
        assert [one["type"] for one in again] == ["http.response.start", "http.response.body"]
    serve.cuts = [(0, "died")]
    answer = await over_unary(serve, "Tokenize", pb.TokenizeRequest(text="hello"))
    assert pb.TokenizeResponse.FromString(answer).token_ids


async def test_a_stream_that_no_replica_takes_over_ends_with_an_event(
    serve: FailingReplicas, replicas: list[Replica]
) -> None:
    for one in replicas[1:]:
        one.engine.fail_all(EngineError("The engine failed."))
    serve.cuts = [(3, "died")]
    received = await over_http(serve, "/v1/completions", STREAMED)
    assert serve.num_sent == 4
    assert error_of(received)["message"] == str(ReplicaDiedError())


async def test_serves_time_limit_ends_a_stream_with_an_event(serve: FailingReplicas) -> None:
    serve.cuts = [(3, "time limit")]
    received = await over_http(serve, "/v1/completions", STREAMED)
    assert serve.num_sent == 1
    assert error_of(received)["type"] == "timeout_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", STREAMED | {"stream": False}),
        ("/app/v1/messages", {"model": "tiny", "max_tokens": 4}),
    ],
)
async def test_serves_time_limit_ends_a_call_with_an_error_of_its_api(
    serve: FailingReplicas, path: str, body: dict[str, Any]
) -> None:
    serve.cuts = [(0, "time limit")]
    start, *parts = await over_http(serve, path, body)
    assert start["status"] == 408
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    error = json.loads(b"".join(one["body"] for one in parts))["error"]
    assert error["type"] == "timeout_error"
    assert error["message"].startswith("Ray Serve's time limit passed")
    assert serve.num_sent == 1


async def test_an_abort_before_a_call_continues_ends_it(
    serve: FailingReplicas, replicas: list[Replica]
) -> None:
    def abort() -> None:
        # Its replica, which hangs, does not get the abort.
        if serve.num_sent == 1:
            replicas[1].servicer.abort_call(ANONYMOUS.name, "x")

    sampling = pb.SamplingParams(max_tokens=200, ignore_eos=True)
    request = pb.GenerateRequest(request_id="x", text="hello", sampling=sampling)
    serve.cuts = [(3, "hung")]
    context = await over_grpc(serve, "Generate", request, abort)
    (sequence,) = read_grpc(context, pb.GenerateResponse)["sequences"].values()
    assert sequence["end"][0] == pb.FINISH_REASON_ABORTED
    assert len(sequence["ids"]) < 200
    # The next call may have the same id.
    reset(replicas)
    serve.cuts = [(3, "died")]
    context = await over_grpc(serve, "Generate", request)
    (sequence,) = read_grpc(context, pb.GenerateResponse)["sequences"].values()
    assert len(sequence["ids"]) == 200


async def test_a_timeout_beyond_all_limits_is_invalid(serve: FailingReplicas) -> None:
    request = pb.GenerateRequest(text="x")
    request.timeout.seconds = 2**62
    context = await over_grpc(serve, "Generate", request)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_invalid_request_is_rejected_once(serve: FailingReplicas) -> None:
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=-1.0))
    context = await over_grpc(serve, "Generate", request)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    received = await over_http(serve, "/v1/completions", {"model": "tiny", "prompt": ""})
    assert received[0]["status"] == 400
    assert serve.num_sent == 2


async def test_continuations_are_counted_by_cause(
    serve: FailingReplicas, replicas: list[Replica]
) -> None:
    serve.cuts = [(3, "died"), (3, "hung")]
    sampling = pb.SamplingParams(max_tokens=90, ignore_eos=True)
    context = await over_grpc(serve, "Generate", pb.GenerateRequest(text="x", sampling=sampling))
    assert context.code is grpc.StatusCode.OK
    counts = [
        {
            cause: one.servicer.metrics.registry.get_sample_value(
                "pagedray_continuations_total", {"cause": cause}
            )
            or 0.0
            for cause in ("died", "hung", "truncated")
        }
        for one in replicas
    ]
    assert [sum(one.values()) for one in counts] == [0.0, 1.0, 1.0, 0.0]
    assert (counts[1]["died"], counts[2]["hung"]) == (1.0, 1.0)
