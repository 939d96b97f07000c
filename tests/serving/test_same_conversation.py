"""One conversation over every API: the same prompt, text and rejections."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from cluster.serving.ray_serve.handle import ServeHandle
from cluster.serving.ray_serve.options import MessagePace
from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt
from pagedray.errors import InvalidRequestError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc

if TYPE_CHECKING:
    from tests.serving.conftest import Server

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
