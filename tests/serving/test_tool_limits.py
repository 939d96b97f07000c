"""Names and numbers of tools up to the limits of Anthropic and OpenAI, in every API."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from cluster.serving.tools.tool import MAX_TOOLS
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.test_messages import TEMPLATE
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer

LONG = "mcp__" + "n" * 123
TURN = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object"}
MakeTool = Callable[[str], dict[str, Any]]  # Any: JSON
FORMS: dict[str, tuple[dict[str, Any], MakeTool]] = {
    "/v1/chat/completions": (
        {"max_tokens": 200, **TURN},
        lambda name: {"type": "function", "function": {"name": name, "parameters": SCHEMA}},
    ),
    "/v1/responses": (
        {"max_output_tokens": 200, "input": "hi"},
        lambda name: {"type": "function", "name": name},
    ),
    "/v1/messages": (
        {"model": "tiny", "max_tokens": 200, **TURN},
        lambda name: {"name": name, "input_schema": SCHEMA, "input_examples": [{"a": 1}]},
    ),
    "/v1/messages/count_tokens": (
        {"model": "tiny", **TURN},
        lambda name: {"name": name, "input_schema": SCHEMA, "input_examples": []},
    ),
    "/tokenize": (TURN, lambda name: {"type": "function", "function": {"name": name}}),
}
CALL = f'<tool_call>\n{{"name": "{LONG}", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tool_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    """A server of a model that calls tools."""
    with Server(template_tokenizer(TEMPLATE), context=2**15) as server:
        yield server


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("num_tools", [1, 129, 187, MAX_TOOLS])
def test_many_tools_with_long_names_are_read(
    tool_server: Server, path: str, num_tools: int
) -> None:
    body, make = FORMS[path]
    names = [LONG, *(f"t{index}" for index in range(num_tools - 1))]
    answer = httpx.post(f"{tool_server.url}{path}", json=body | {"tools": list(map(make, names))})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", FORMS)
def test_one_tool_more_is_rejected(tool_server: Server, path: str) -> None:
    body, make = FORMS[path]
    tools = [make(f"t{index}") for index in range(MAX_TOOLS + 1)]
    answer = httpx.post(f"{tool_server.url}{path}", json=body | {"tools": tools})
    assert answer.status_code == 400
    text = "tools may have at most 1024 entries, not 1025."
    assert answer.json()["error"]["message"] == text


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("name", ["", "n" * 129, "a b", "a/b"])
def test_other_names_are_rejected(tool_server: Server, path: str, name: str) -> None:
    body, make = FORMS[path]
    answer = httpx.post(f"{tool_server.url}{path}", json=body | {"tools": [make(name)]})
    assert answer.status_code == 400
    assert "must be 1 to 128 letters, digits," in answer.json()["error"]["message"]


def test_many_tools_with_long_names_are_read_over_grpc(tool_server: Server) -> None:
    names = [LONG, *(f"t{index}" for index in range(200))]
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")],
        tools=[pb.Tool(name=name) for name in names],
    )
    tool_server.say(CALL)
    with grpc.insecure_channel(tool_server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        deltas = [
            call
            for response in stub.Chat(request)
            for sequence in response.sequences
            for call in sequence.tool_calls
        ]
    assert deltas[0].name == LONG


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_call_of_a_long_name_is_returned_and_taken_back(
    tool_server: Server, path: str, stream: bool
) -> None:
    body, make = FORMS[path]
    tool_server.say(CALL)
    answer = httpx.post(
        f"{tool_server.url}{path}", json=body | {"tools": [make(LONG)], "stream": stream}
    )
    assert LONG in answer.text
    turns: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [
            {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": LONG, "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "5", "name": LONG},
        ],
        "/v1/responses": [
            {"type": "function_call", "call_id": "c", "name": LONG, "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
        ],
        "/v1/messages": [
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": LONG, "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        ],
    }  # fmt: skip
    field = "input" if path == "/v1/responses" else "messages"
    first = [{"role": "user", "content": "hi"}]
    again = httpx.post(
        f"{tool_server.url}{path}",
        json=body | {"tools": [make(LONG)], field: first + turns[path]},
    )
    assert again.status_code == 200, again.text
