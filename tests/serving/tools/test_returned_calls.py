"""Damaged calls over every API: none ends in an error, and each can be sent back with a result."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, ClassVar

import grpc
import httpx
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server
from tests.serving.tools.test_damaged_calls import (
    HALF,
    TOOLS,
    WRITTEN,
    damaged,
)
from tests.serving.tools.test_tool_calls import deepseek
from tests.slow_params import some_slow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer

Json = dict[str, Any]

TEMPLATE = (
    "{# %s #}{% for message in messages %}{{ message.role }}={{ message.content }}"
    "{% for call in message.tool_calls or [] %}!{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %};{% endfor %}>{% if tools %}{% endif %}"
)
SHOWN = {
    "deepseek_v3": deepseek("[calls_begin]"),
    "gemma4": "<|tool_call>",
    "glm45": "<tool_call> <arg_key>",
    "hermes": "<tool_call>",
    "lfm2": "<|tool_call_start|>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "openai": "<|channel|>commentary",
    "pythonic": "[func_name1(",
    "qwen3_coder": "<tool_call> <function=",
}
ASK = [{"role": "user", "content": "hi"}]
MAX_TOKENS = 2000


@pytest.fixture(scope="module", params=sorted(SHOWN))
def served(
    request: pytest.FixtureRequest, template_tokenizer: Callable[..., Tokenizer]
) -> Iterator[tuple[str, Server]]:
    """A server of a model that writes calls in a format, and the format."""
    template = TEMPLATE.replace("%s", SHOWN[request.param])
    # Shared by all calls: an HTTP client takes long to make.
    with (
        Server(template_tokenizer(template), context=16384) as server,
        httpx.Client(timeout=60) as Client.http,
        grpc.insecure_channel(server.grpc_target) as Client.channel,
    ):
        yield request.param, server


class Client:
    """One API: it asks with the tools, and sends a turn back with results of its calls."""

    http: ClassVar[httpx.Client]
    channel: ClassVar[grpc.Channel]
    path: str
    tools: list[Json]

    def __init__(self, server: Server) -> None:
        self.server = server

    def post(self, body: Json) -> httpx.Response:
        body = {"model": "tiny", "tools": self.tools} | body
        answer = self.http.post(f"{self.server.url}/v1/{self.path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    def events(self, body: Json) -> list[Json]:
        lines = self.post(body | {"stream": True}).text.splitlines()
        data = [line[6:] for line in lines if line.startswith("data: ") and line[6:] != "[DONE]"]
        found = [json.loads(one) for one in data]
        assert not any("error" in (one, one.get("type")) or "error" in one for one in found)
        return found

    def ask(self, max_tokens: int, *, is_stream: bool) -> tuple[Any, list[tuple[str, str]]]:
        """Return the turn as it is sent back, and the names and arguments of its calls."""
        raise NotImplementedError

    def send_back(self, turn: Any) -> None:
        """Send a turn that `ask` returned, and a result for each of its calls."""
        raise NotImplementedError


class ChatClient(Client):
    path = "chat/completions"
    tools = [  # noqa: RUF012  # a constant
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TOOLS.items()
    ]

    def ask(self, max_tokens: int, *, is_stream: bool) -> tuple[Any, list[tuple[str, str]]]:
        body = {"messages": ASK, "max_tokens": max_tokens}
        if not is_stream:
            turn = self.post(body).json()["choices"][0]["message"]
        else:
            turn = {"role": "assistant", "content": "", "tool_calls": []}
            for event in self.events(body):
                delta = event["choices"][0]["delta"]
                turn["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls", ()):
                    if "id" in call:
                        turn["tool_calls"].append(call)
                    else:
                        function = turn["tool_calls"][call["index"]]["function"]
                        function["arguments"] += call["function"]["arguments"]
        calls = [call["function"] for call in turn.get("tool_calls", ())]
        return turn, [(call["name"], call["arguments"]) for call in calls]

    def send_back(self, turn: Any) -> None:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            for call in turn.get("tool_calls", ())
        ]
        self.post({"messages": [*ASK, turn, *results], "max_tokens": 1})


class ResponsesClient(Client):
    path = "responses"
    tools = [  # noqa: RUF012  # a constant
        {"type": "function", "name": name, "parameters": schema, "strict": False}
        for name, schema in TOOLS.items()
    ]

    def ask(self, max_tokens: int, *, is_stream: bool) -> tuple[Any, list[tuple[str, str]]]:
        body = {"input": "hi", "max_output_tokens": max_tokens}
        if not is_stream:
            items = self.post(body).json()["output"]
        else:
            events = self.events(body)
            items = events[-1]["response"]["output"]
            deltas: dict[int, str] = {}
            for event in events:
                if event["type"] == "response.function_call_arguments.delta":
                    place = event["output_index"]
                    deltas[place] = deltas.get(place, "") + event["delta"]
            for place, item in enumerate(items):
                assert item.get("arguments", "") == deltas.get(place, "")
        calls = [item for item in items if item["type"] == "function_call"]
        return items, [(call["name"], call["arguments"]) for call in calls]

    def send_back(self, turn: Any) -> None:
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
            for item in turn
            if item["type"] == "function_call"
        ]
        self.post({"input": [*ASK, *turn, *results], "max_output_tokens": 1})


class MessagesClient(Client):
    path = "messages"
    tools = [  # noqa: RUF012  # a constant
        {"name": name, "input_schema": {"type": "object"} | schema}
        for name, schema in TOOLS.items()
    ]

    def ask(self, max_tokens: int, *, is_stream: bool) -> tuple[Any, list[tuple[str, str]]]:
        body = {"messages": ASK, "max_tokens": max_tokens}
        if not is_stream:
            turn = self.post(body).json()["content"]
            return turn, [
                (block["name"], json.dumps(block["input"]))
                for block in turn
                if block["type"] == "tool_use"
            ]
        blocks: list[Json] = []
        pieces: list[str] = []
        for event in self.events(body):
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
                pieces.append("")
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                pieces[event["index"]] += delta.get("partial_json", delta.get("text", ""))
        calls = []
        for block, text in zip(blocks, pieces, strict=True):
            if block["type"] == "text":
                block["text"] = text
            else:
                calls.append((block["name"], text))
                block["input"] = {} if max_tokens < MAX_TOKENS else json.loads(text)
        return blocks, calls

    def send_back(self, turn: Any) -> None:
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "5"}
            for block in turn
            if block["type"] == "tool_use"
        ]
        said = [{"role": "assistant", "content": turn}]
        said += [{"role": "user", "content": results or "go on"}]
        self.post({"messages": [*ASK, *said], "max_tokens": 1})


class RpcClient(Client):
    def ask(self, max_tokens: int, *, is_stream: bool) -> tuple[Any, list[tuple[str, str]]]:
        turn = pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT)
        for response in self.chat([], max_tokens):
            for sequence in response.sequences:
                turn.content += sequence.content
                for call in sequence.tool_calls:
                    if call.name:
                        turn.tool_calls.add(id=call.id, name=call.name)
                    turn.tool_calls[call.index].arguments += call.arguments
        return turn, [(call.name, call.arguments) for call in turn.tool_calls]

    def send_back(self, turn: Any) -> None:
        results = [
            pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, tool_call_id=call.id, content="5")
            for call in turn.tool_calls
        ]
        self.chat([turn, *results], 1)

    def chat(self, others: list[pb.ChatMessage], max_tokens: int) -> list[pb.ChatResponse]:
        tools = [
            pb.Tool(name=name, parameters=json.dumps(schema)) for name, schema in TOOLS.items()
        ]
        request = pb.ChatRequest(
            messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi"), *others],
            tools=tools,
            sampling=pb.SamplingParams(max_tokens=max_tokens),
        )
        return list(pagedray_pb2_grpc.GenerationServiceStub(self.channel).Chat(request))


CLIENTS = (ChatClient, ResponsesClient, MessagesClient, RpcClient)


def texts_of(tool_format: str) -> list[str]:
    """Return turns with calls as models write them, and with random damage."""
    generator = random.Random(tool_format)
    # Not those with thousands of characters, each of which is a token.
    texts = [text for text in WRITTEN[tool_format] if len(text) < 400]
    chosen = [text for text in texts if HALF in text][:2] + generator.sample(texts, 2)
    return [*chosen, damaged(generator.choice(texts), generator)]


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_calls_can_be_sent_back(served: tuple[str, Server], is_whole: bool) -> None:
    tool_format, server = served
    # Cut short, each kind of text goes to two of the four APIs in turn.
    for number, text in enumerate(texts_of(tool_format)[:: 1 if is_whole else 2]):
        found = []
        clients = CLIENTS if is_whole else (CLIENTS[number], CLIENTS[(number + 1) % 4])
        for client in [make(server) for make in clients]:
            num_tokens = server.say(text)
            for is_stream in (False, True):
                turn, calls = client.ask(MAX_TOKENS, is_stream=is_stream)
                found.append([(name, json.loads(given)) for name, given in calls])
                client.send_back(turn)
            cut, _ = client.ask(max(1, num_tokens * 2 // 3), is_stream=True)
            client.send_back(cut)
        assert all(isinstance(given, dict) for calls in found for _, given in calls)
        assert found == [found[0]] * len(found), text


HARDLY_DEPENDS_ON_FORMAT = pytest.mark.parametrize(
    "served",
    some_slow(sorted(SHOWN), slow=sorted(SHOWN.keys() - {"hermes", "openai"})),
    indirect=True,
)
GIVEN = ["null", '""', "{", '{"where": "a', rf'{{"where": "{HALF}"}}', '{"where": "a\\', '{"a": tr']


@HARDLY_DEPENDS_ON_FORMAT
def test_arguments_of_other_servers_are_accepted(served: tuple[str, Server]) -> None:
    _, server = served
    server.say("ok")
    for arguments in GIVEN:
        function = {"name": "look", "arguments": arguments}
        call = {"id": "c1", "type": "function", "function": function}
        ChatClient(server).send_back({"role": "assistant", "content": None, "tool_calls": [call]})
        ResponsesClient(server).send_back([{"type": "function_call", "call_id": "c1", **function}])
        tool_calls = [pb.ToolCall(id="c1", **function)]
        turn = pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, tool_calls=tool_calls)
        RpcClient(server).send_back(turn)


@HARDLY_DEPENDS_ON_FORMAT
def test_any_number_of_calls_can_be_sent_back(served: tuple[str, Server]) -> None:
    _, server = served
    server.say("ok")
    ids = [f"call{number:05}" for number in range(300)]
    function = {"name": "now", "arguments": "{}"}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    ChatClient(server).send_back({"role": "assistant", "content": None, "tool_calls": calls})
    items = [{"type": "function_call", "call_id": one, **function} for one in ids]
    ResponsesClient(server).send_back(items)
    blocks = [{"type": "tool_use", "id": one, "name": "now", "input": {}} for one in ids]
    MessagesClient(server).send_back(blocks)
    tool_calls = [pb.ToolCall(id=one, **function) for one in ids]
    RpcClient(server).send_back(pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, tool_calls=tool_calls))
