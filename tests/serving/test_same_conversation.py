"""One conversation over every API: the same prompt, text, parameters and rejections."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

import pagedray
from cluster.serving.openai.bodies import generation_body
from cluster.serving.ray_serve.handle import ServeHandle
from cluster.serving.ray_serve.options import MessagePace
from cluster.serving.telemetry.log_lines import LineLimit
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc

if TYPE_CHECKING:
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

TURNS = (
    ("system", "Be brief."),
    ("user", "What is a h\u00e9ron?"),
    ("assistant", "A bird."),
    ("user", "How large?"),
)
_ROLES = {
    "system": pb.CHAT_ROLE_SYSTEM,
    "user": pb.CHAT_ROLE_USER,
    "assistant": pb.CHAT_ROLE_ASSISTANT,
}
Sampling = dict[str, Any]  # Any: fields of all types
Ask = Callable[["Server", Sampling], tuple[str, str]]
"""Returns the text and no error, or no text and the error."""


def posted(server: Server, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    answer = httpx.post(f"{server.url}{path}", json={"model": "tiny"} | body, timeout=60).json()
    return answer, answer["error"]["message"] if answer.get("error") else ""


def ask_chat(server: Server, sampling: Sampling) -> tuple[str, str]:
    messages = [{"role": role, "content": text} for role, text in TURNS]
    answer, error = posted(server, "/v1/chat/completions", {"messages": messages} | sampling)
    return ("" if error else answer["choices"][0]["message"]["content"]), error


def ask_responses(server: Server, sampling: Sampling) -> tuple[str, str]:
    given = {{"max_tokens": "max_output_tokens"}.get(name, name): v for name, v in sampling.items()}
    items = [{"role": role, "content": text} for role, text in TURNS]
    answer, error = posted(server, "/v1/responses", {"input": items} | given)
    return ("" if error else answer["output"][0]["content"][0]["text"]), error


def ask_messages(server: Server, sampling: Sampling) -> tuple[str, str]:
    (_, system), *others = TURNS
    messages = [{"role": role, "content": text} for role, text in others]
    answer, error = posted(
        server, "/v1/messages", {"system": system, "messages": messages} | sampling
    )
    return ("" if error else answer["content"][0]["text"]), error


def ask_grpc(server: Server, sampling: Sampling) -> tuple[str, str]:
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role=_ROLES[role], content=text) for role, text in TURNS],
        sampling=pb.SamplingParams(**sampling),
    )
    with grpc.insecure_channel(server.grpc_target) as channel:
        try:
            answers = list(pagedray_pb2_grpc.GenerationServiceStub(channel).Chat(request))
        except grpc.RpcError as error:
            return "", error.details() or ""
    return "".join(one.content for answer in answers for one in answer.sequences), ""


def ask_handle(server: Server, sampling: Sampling) -> tuple[str, str]:
    prompt = ChatPrompt(tuple(ChatMessage(role, text) for role, text in TURNS))

    async def run() -> str:
        outputs = ServeHandle(server.frontends.servicer, MessagePace(1e6)).generate(
            prompt,
            sampling,
            model=None,
            request_id=None,
            priority=0,
            timeout_s=None,
            key=None,
        )
        return "".join([one.text async for output in outputs for one in output.sequences])

    try:
        return asyncio.run_coroutine_threadsafe(run(), server.loop).result(60), ""
    except InvalidRequestError as error:
        return "", str(error)


APIS: dict[str, Ask] = {
    "chat": ask_chat,
    "responses": ask_responses,
    "messages": ask_messages,
    "grpc": ask_grpc,
    "handle": ask_handle,
}
PLAIN = {"max_tokens": 24, "temperature": 0.5, "top_p": 0.9}


def test_every_api_gives_the_model_the_same_request(server: Server) -> None:
    texts = {name: ask(server, PLAIN) for name, ask in APIS.items()}
    assert len(set(texts.values())) == 1, texts
    assert texts["chat"][0] != ""
    submitted = server.engine.log.submitted
    assert len(submitted) == len(APIS)
    assert len({request.prompt_token_ids for request in submitted}) == 1
    assert len({(r.sampling.temperature, r.sampling.top_p) for r in submitted}) == 1


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 101.0}, {"top_p": 1.5}, {"temperature": -1.0}],
    ids=str,
)
def test_every_api_rejects_with_the_same_words(server: Server, sampling: Sampling) -> None:
    errors = {name: ask(server, PLAIN | sampling) for name, ask in APIS.items()}
    # Each names fields as its own clients do.
    same = {
        (text, error.replace("max_output_tokens", "max_tokens")) for text, error in errors.values()
    }
    assert len(same) == 1, errors
    assert errors["chat"][1] != ""
    assert server.engine.log.submitted == []


def test_every_api_rejects_too_many_tokens_with_the_same_numbers(server: Server) -> None:
    errors = {name: ask(server, PLAIN | {"max_tokens": 100_000})[1] for name, ask in APIS.items()}
    # Clients of Messages read the numbers in Anthropic's words.
    found = re.search(r"(\d+) \+ 100000 > (\d+),", errors.pop("messages"))
    assert found is not None
    num_tokens, context = map(int, found.groups())
    wanted = (
        f"max_tokens must be from 1 to {context - num_tokens}, not 100000: the prompt has "
        f"{num_tokens} tokens and the context length is {context}."
    )
    same = {error.replace("max_output_tokens", "max_tokens") for error in errors.values()}
    assert same == {wanted}
    assert server.engine.log.submitted == []


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ARGUMENTS = '{"city": "K\u00f6ln"}'
QUESTION = [{"role": "user", "content": "How is it?"}]
FUNCTION = {"name": "weather", "description": "d", "parameters": PARAMETERS}
Call = tuple[str, Any]  # Any: JSON


def call_of_tools(server: Server) -> Call:
    named = {"type": "function", "function": {"name": "weather"}}
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": QUESTION, "tools": tools, "tool_choice": named}
    answer, _ = posted(server, "/v1/chat/completions", body)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def call_of_functions(server: Server) -> Call:
    body = {"messages": QUESTION, "functions": [FUNCTION], "function_call": {"name": "weather"}}
    answer, _ = posted(server, "/v1/chat/completions", body)
    call = answer["choices"][0]["message"]["function_call"]
    return call["name"], json.loads(call["arguments"])


def call_of_responses(server: Server) -> Call:
    named = {"type": "function", "name": "weather"}
    body = {"input": QUESTION, "tools": [{"type": "function", **FUNCTION}], "tool_choice": named}
    answer, _ = posted(server, "/v1/responses", body)
    (call,) = answer["output"]
    return call["name"], json.loads(call["arguments"])


def call_of_messages(server: Server) -> Call:
    tool = {"name": "weather", "description": "d", "input_schema": PARAMETERS}
    named = {"type": "tool", "name": "weather"}
    body = {"messages": QUESTION, "tools": [tool], "tool_choice": named, "max_tokens": 90}
    answer, _ = posted(server, "/v1/messages", body)
    (call,) = answer["content"]
    return call["name"], call["input"]


def call_of_grpc(server: Server) -> Call:
    tool = pb.Tool(name="weather", description="d", parameters=json.dumps(PARAMETERS))
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="How is it?")],
        tools=[tool],
        tool_choice=pb.ToolChoice(tool="weather"),
    )
    with grpc.insecure_channel(server.grpc_target) as channel:
        answers = list(pagedray_pb2_grpc.GenerationServiceStub(channel).Chat(request))
    deltas = [call for answer in answers for one in answer.sequences for call in one.tool_calls]
    return deltas[0].name, json.loads("".join(call.arguments for call in deltas))


def test_every_api_forces_and_returns_the_same_call(server: Server) -> None:
    server.say(ARGUMENTS)
    asks = (call_of_tools, call_of_functions, call_of_responses, call_of_messages, call_of_grpc)
    calls = [ask(server) for ask in asks]
    assert calls == [("weather", json.loads(ARGUMENTS))] * len(asks)
    submitted = server.engine.log.submitted
    assert len({request.prompt_token_ids for request in submitted}) == 1
    structures = [request.sampling.structure for request in submitted]
    assert all(structures)
    assert structures == structures[:1] * len(asks)


Stub = pagedray_pb2_grpc.GenerationServiceStub
PAGE = Path(__file__).parents[2] / "cluster" / "serving" / "admin" / "web" / "index.html"
GIVEN: dict[str, Any] = {  # Any: fields of several types
    "n": 2,
    "max_tokens": 3,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {7: 1.5},
    "allowed_token_ids": (5, 6),
    "bad_words": ("fox",),
    "seed": 4,
    "stop": ("zz",),
    "stop_token_ids": (8,),
    "ignore_eos": True,
    "disable_spec_decode": True,
    "logprobs": 2,
    "logprob_token_ids": (9,),
    "prompt_logprobs": 1,
}
ON_THE_PAGE = GIVEN.keys() - {
    *("n", "logprobs", "logprob_token_ids", "prompt_logprobs", "max_tokens"),
    "disable_spec_decode",
}
"""Parameters of one answer that the page shows; its `max_tokens` has the name of chats."""


def test_all_parameters_are_tested() -> None:
    # Both need a conversation or a grammar, and have tests of their own.
    others = {"structure", "thinking_token_budget"}
    assert GIVEN.keys() | others == set(SamplingParams.__struct_fields__)


def submitted_to(engine: FakeEngine) -> dict[str, Any]:  # Any: as above
    [request] = engine.log.submitted
    return {name: getattr(request.sampling, name) for name in GIVEN}


def test_parameters_are_set_over_http(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "x", **GIVEN})
    assert answer.status_code == 200, answer.text
    assert submitted_to(engine) == GIVEN


def test_parameters_are_set_over_grpc(stub: Stub, engine: FakeEngine) -> None:
    list(stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**GIVEN))))
    assert submitted_to(engine) == GIVEN


def test_page_has_a_field_for_each_parameter_of_an_answer() -> None:
    assert set(re.findall(r'name="(\w+)"', PAGE.read_text())) >= ON_THE_PAGE


Given = dict[str, Any]  # Any: JSON
CONTEXT = 256
HELLO = 3
"""Tokens of the prompt `hello`, and of that message."""
TURN = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, Given] = {
    "/v1/completions": {"prompt": [5] * HELLO},
    "/v1/chat/completions": TURN,
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"model": "tiny", "max_tokens": 9, **TURN},
}
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
CHATS = ("/v1/completions", "/v1/chat/completions")
UNSET: list[tuple[tuple[str, ...], Given, Given]] = [
    ((*OPENAI, "/v1/messages"), {"seed": -1}, {"seed": None}),
    (OPENAI, {"disable_spec_decode": None}, {"disable_spec_decode": False}),
    (OPENAI, {"disable_spec_decode": True}, {"disable_spec_decode": True}),
    (OPENAI, {"vllm_xargs": {"other": 1}}, {"disable_spec_decode": False}),
    (OPENAI, {"seed": None}, {"seed": None}),
    (OPENAI, {"seed": -1.0}, {"seed": None}),
    (OPENAI, {"seed": -2}, {"seed": -2}),
    (OPENAI, {"seed": 42.0}, {"seed": 42}),
    ((*OPENAI, "/v1/messages"), {"top_k": 40.0}, {"top_k": 40}),
    ((*OPENAI, "/v1/messages"), {"top_k": 0}, {"top_k": 0}),
    ((*OPENAI, "/v1/messages"), {"top_k": -1}, {"top_k": -1}),
    ((*OPENAI, "/v1/messages"), {"top_k": None}, {"top_k": 0}),
    ((*OPENAI, "/v1/messages"), {"temperature": None, "top_p": None}, {"temperature": 1.0}),
    (OPENAI, {"stop": None}, {"stop": ()}),
    (OPENAI, {"stop": ""}, {"stop": ()}),
    (OPENAI, {"stop": []}, {"stop": ()}),
    (("/v1/messages",), {"stop_sequences": []}, {"stop": ()}),
    (("/v1/messages",), {"stop_sequences": None}, {"stop": ()}),
    (OPENAI, {"logit_bias": None}, {"logit_bias": {}}),
    (OPENAI, {"logit_bias": {}}, {"logit_bias": {}}),
    (OPENAI, {"logit_bias": []}, {"logit_bias": {}}),
    (CHATS, {"n": None}, {"n": 1}),
    (CHATS, {"n": 2.0}, {"n": 2}),
    (CHATS, {"logprobs": None}, {"logprobs": None}),
    (CHATS, {"logprobs": False}, {"logprobs": None}),
    (("/v1/completions",), {"logprobs": 2.0}, {"logprobs": 2}),
    (("/v1/chat/completions",), {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
    (("/v1/completions",), {"max_tokens": None}, {"max_tokens": 16}),
    (("/v1/completions",), {"max_tokens": -1}, {"max_tokens": CONTEXT - HELLO}),
    (("/v1/completions",), {"max_completion_tokens": -1}, {"max_tokens": CONTEXT - HELLO}),
    (("/v1/completions",), {"max_completion_tokens": 7}, {"max_tokens": 7}),
    (("/v1/completions",), {"max_completion_tokens": None, "max_tokens": 5}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": 5.0}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": 6, "max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHATS, {"max_tokens": -1, "max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHATS, {"stop_token_ids": [], "bad_words": []}, {"stop_token_ids": (), "bad_words": ()}),
    (("/v1/responses",), {"max_output_tokens": 5.0}, {"max_tokens": 5}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [(path, given, expected) for paths, given, expected in UNSET for path in paths],
)
def test_unset_values_are_accepted(
    server: Server, path: str, given: Given, expected: Given
) -> None:
    answer = httpx.post(f"{server.url}{path}", json=BODIES[path] | given)
    assert answer.status_code == 200, answer.text
    [request] = server.engine.log.submitted
    found = {name: getattr(request.sampling, name) for name in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
def test_minus_one_is_no_limit(server: Server, path: str, name: str) -> None:
    limits = []
    for given in ({}, {name: -1}):
        server.engine.reset()
        answer = httpx.post(f"{server.url}{path}", json=BODIES[path] | given)
        assert answer.status_code == 200, answer.text
        limits.append(server.engine.log.submitted[0].sampling.max_tokens)
    assert limits[0] == limits[1] > 200


def test_a_random_seed_differs_between_requests(server: Server) -> None:
    for _ in range(2):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "seed": -1})
    first, second = (request.seed for request in server.engine.log.submitted)
    assert first != second
    assert min(first, second) >= 0


def test_seed_of_minus_one_is_random_over_grpc(stub: Stub, engine: FakeEngine) -> None:
    sampling = pb.SamplingParams(seed=-1)
    list(stub.Generate(pb.GenerateRequest(text="x", sampling=sampling)))
    [request] = engine.log.submitted
    assert request.sampling.seed is None
    assert request.seed >= 0


def test_seed_of_minus_one_is_random_in_python() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-1) == SamplingParams()
    params = pagedray.SamplingParams(seed=-1, max_tokens=-1, stop="")
    assert params == pagedray.SamplingParams(seed=None, max_tokens=None, stop=None)


def test_two_limits_are_logged(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_body, "_conflict_lines", LineLimit())
    caplog.set_level(logging.INFO)
    body = {"prompt": "x", "max_tokens": 600, "max_completion_tokens": 300}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert error["param"] == "max_completion_tokens"
    assert error["message"].startswith("max_completion_tokens must be from 1 to 254, not 300:")
    lines = [line for line in caplog.messages if line.startswith("Calls with different values")]
    assert lines == [
        "Calls with different values of max_tokens and max_completion_tokens, of which the smaller "
        "is used: 1, the last one with 600 and 300."
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_tokens": -2}, "max_tokens must be 1 or more, not -2."),
        ({"max_tokens": 5.5}, "max_tokens must be an integer, not 5.5."),
        ({"max_tokens": "5"}, "max_tokens must be an integer, not '5'."),
        ({"n": 0.0}, "n must be from 1 to 128, not 0."),
        ({"logprobs": True}, "logprobs must be an integer, not true."),
        ({"seed": "-1"}, "seed must be an integer, not '-1'."),
        ({"disable_spec_decode": 1}, "disable_spec_decode must be true or false, not 1."),
        (
            {"disable_speculative_decoding": True},
            "disable_speculative_decoding is not supported: did you mean disable_spec_decode?",
        ),
        (
            {"vllm_xargs": {"disable_spec_decode": 1}},
            "vllm_xargs.disable_spec_decode is not supported: use disable_spec_decode of the "
            "request.",
        ),
        ({"logit_bias": [1]}, "logit_bias must be an object that maps token ids to numbers."),
        ({"stop": [5]}, "stop must contain strings of 1 to 512 characters."),
    ],
)
def test_other_values_are_rejected(server: Server, given: Given, text: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"} | given)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, text)
