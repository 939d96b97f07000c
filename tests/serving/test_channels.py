"""Turns of gpt-oss over every API that has conversations, as their clients read them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import openai
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer

SPECIAL_TOKENS = [
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>")
]
TEMPLATE = (
    "{% if tools %}tools {% endif %}{% for message in messages %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ message.thinking }}<|end|>{% endif %}"
    "{% if message.tool_calls %}<|start|>assistant to={{ message.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ message.tool_calls[0].function.arguments | tojson }}"
    "<|call|>{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>"
    "{% endif %}{% endfor %}<|start|>assistant"
)
THINKS = "<|channel|>analysis<|message|>I look at <b>.<|end|><|start|>assistant"
ANSWER = f"{THINKS}<|channel|>final<|message|>It is 5."
CALL = f'{THINKS}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{{"a": 1}}'
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]  # Any: what clients call a param
ASK: list[Any] = [{"role": "user", "content": "hi"}]  # Any: as above
FOUND = {
    ANSWER: ("I look at <b>.", "It is 5.", []),
    CALL: ("I look at <b>.", "", [("look", '{"a": 1}')]),
}


@pytest.fixture(scope="module")
def channel_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    tokenizer = template_tokenizer(TEMPLATE, special_tokens=SPECIAL_TOKENS)
    with Server(tokenizer, context=1024) as server:
        yield server


@pytest.fixture
def client(channel_server: Server) -> Iterator[openai.OpenAI]:
    channel_server.engine.reset()
    url = f"{channel_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("text", [ANSWER, CALL])
@pytest.mark.parametrize("is_stream", [False, True])
def test_chat_has_reasoning_content_and_calls(
    channel_server: Server, client: openai.OpenAI, text: str, is_stream: bool
) -> None:
    channel_server.say(text)
    given: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS}
    if is_stream:
        with client.chat.completions.stream(**given) as stream:
            choice: Any = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**given).choices[0]
    calls = [
        (call.function.name, call.function.arguments) for call in choice.message.tool_calls or []
    ]
    message = choice.message.model_dump()
    assert (message["reasoning"], message["content"] or "", calls) == FOUND[text]
    assert choice.finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("text", [ANSWER, CALL])
def test_responses_have_items_of_each_kind(
    channel_server: Server, client: openai.OpenAI, text: str
) -> None:
    channel_server.say(text)
    tools: list[Any] = [{"type": "function", "strict": None, **FUNCTION}]
    with client.responses.stream(model="tiny", input="hi", tools=tools) as stream:
        response = stream.get_final_response()
    reasoning, other = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    calls = [(other.name, other.arguments)] if other.type == "function_call" else []
    assert (reasoning.content[0].text, response.output_text, calls) == FOUND[text]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 5


@pytest.mark.parametrize("text", [ANSWER, CALL])
def test_messages_have_blocks_of_each_kind(channel_server: Server, text: str) -> None:
    channel_server.engine.reset()
    channel_server.say(text)
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"model": "tiny", "max_tokens": 256, "messages": ASK, "tools": tools}
    answer = httpx.post(f"{channel_server.url}/v1/messages", json=body, timeout=60).json()
    thinking, other = answer["content"]
    calls = [(other["name"], json.dumps(other["input"]))] if other["type"] == "tool_use" else []
    assert (thinking["thinking"], other.get("text", ""), calls) == FOUND[text]


def test_grpc_separates_channels(channel_server: Server) -> None:
    channel_server.engine.reset()
    channel_server.say(ANSWER)
    user = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")
    with grpc.insecure_channel(channel_server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        parts = list(stub.Chat(pb.ChatRequest(messages=[user])))
    assert "".join(part.sequences[0].reasoning for part in parts) == "I look at <b>."
    assert "".join(part.sequences[0].content for part in parts) == "It is 5."


def test_template_reads_one_call_at_a_time(channel_server: Server, client: openai.OpenAI) -> None:
    channel_server.say(ANSWER)
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("one", "two")
    ]
    turn: Any = {
        "role": "assistant", "content": "I go.", "reasoning": "Hm.", "tool_calls": calls
    }  # fmt: skip
    results: list[Any] = [
        {"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("two", "one")
    ]
    client.chat.completions.create(model="tiny", messages=[*ASK, turn, *results])
    (request,) = channel_server.engine.log.submitted
    prompt = channel_server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\nI go.<|end|>"
        "<|start|>assistant to=one<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>tool<|message|>of one<|end|>"
        "<|start|>assistant to=two<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>tool<|message|>of two<|end|><|start|>assistant"
    )


def test_calls_of_one_id_have_a_result_each(channel_server: Server, client: openai.OpenAI) -> None:
    channel_server.say(ANSWER)
    calls = [
        {"id": "same", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("one", "two")
    ]
    turn: Any = {"role": "assistant", "content": None, "tool_calls": calls}
    results: list[Any] = [
        {"role": "tool", "tool_call_id": "same", "content": f"of {name}"} for name in ("one", "two")
    ]
    client.chat.completions.create(model="tiny", messages=[*ASK, turn, *results])
    (request,) = channel_server.engine.log.submitted
    prompt = channel_server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith(
        "<|start|>assistant to=one<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>tool<|message|>of one<|end|>"
        "<|start|>assistant to=two<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>tool<|message|>of two<|end|><|start|>assistant"
    )


def headers_of(server: Server) -> dict[str, str]:
    """Return the headers that may follow the reasoning of the call, with what they stand for."""
    (request,) = server.engine.log.submitted
    assert request.reasoning is not None
    decoded = {
        server.tokenizer.decode(one.token_ids, skip_special_tokens=False): one.text
        for one in request.reasoning.answer_headers
    }
    for one in request.reasoning.answer_headers:
        begun = one.token_ids[: request.reasoning.num_prompt_tokens]
        assert server.tokenizer.decode(begun, skip_special_tokens=False) == "<|start|>assistant"
    return decoded


FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
TWO_TOOLS: list[Any] = [*TOOLS, {"type": "function", "function": {**FUNCTION, "name": "look_up"}}]
LOOK = {"type": "function", "function": {"name": "look"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("given", "headers"),
    [
        ({"response_format": {"type": "json_object"}}, {FINAL: ""}),
        ({"tools": TWO_TOOLS, "tool_choice": LOOK}, {TO.format("look"): ""}),
        ({"tools": TOOLS, "tool_choice": "required"}, {TO.format("look"): ""}),
        (
            {"tools": TWO_TOOLS, "tool_choice": "required"},
            {TO.format("look"): "look ", TO.format("look_up"): "look_up "},
        ),
        (
            {"tools": TOOLS, "response_format": SCHEMA},
            {TO.format("look"): "look ", FINAL: " "},
        ),
    ],
)
def test_structures_follow_the_header_of_their_message(
    channel_server: Server, client: openai.OpenAI, given: dict[str, Any], headers: dict[str, str]
) -> None:
    channel_server.say(ANSWER)
    client.chat.completions.create(model="tiny", messages=ASK, **given)
    assert headers_of(channel_server) == headers


@pytest.mark.parametrize("choice", ["required", LOOK])
def test_forced_calls_are_read_from_their_channel(
    channel_server: Server, client: openai.OpenAI, choice: Any
) -> None:
    channel_server.say(CALL)
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TWO_TOOLS, tool_choice=choice
    )
    message: Any = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"a": 1}')
    assert not message.content


def test_a_message_that_the_prompt_begins_is_no_forced_call(
    channel_server: Server, client: openai.OpenAI
) -> None:
    messages = [*ASK, {"role": "assistant", "content": "It is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(openai.BadRequestError, match="in a message that the prompt begins"):
        client.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, tool_choice="required", extra_body=options
        )
    assert not channel_server.engine.log.submitted
