"""Structured output and templates of requests over HTTP."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import grpc
import httpx
import pytest
from pydantic import BaseModel

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openai

    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig
    from pagedray.request import Request

USER: Any = {"role": "user", "content": "hi"}  # Any: what the client calls a param
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAG: dict[str, Any] = {  # Any: JSON
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA | {"default": None}, "end": "</f>"}],
    "triggers": ["<f"],
}
TAG_TEXT = json.dumps(TAG, separators=(",", ":"))


class Animal(BaseModel):
    """The requested output."""

    kind: Literal["fox", "dog"]
    age: int


def test_parsed_response_is_the_clients_model(openai_client: openai.OpenAI, server: Server) -> None:
    token_ids = server.tokenizer.encode('{"kind": "fox", "age": 3}', add_special_tokens=False)

    def script(request: Request, index: int) -> list[int]:
        return [*token_ids, 1]

    server.engine.script = script
    answer = openai_client.chat.completions.parse(
        model="tiny", messages=[USER], response_format=Animal
    )
    assert answer.choices[0].message.parsed == Animal(kind="fox", age=3)
    structure = server.engine.log.submitted[0].sampling.structure
    assert structure is not None
    assert structure.kind == "json_schema"
    assert json.loads(structure.text)["properties"]["age"]["type"] == "integer"


CASES: list[tuple[dict[str, Any], str, str]] = [  # Any: JSON
    ({"response_format": {"type": "json_object"}}, "json_object", ""),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        "json_schema",
        json.dumps(SCHEMA, separators=(",", ":")),
    ),
    ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
    ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
    ({"guided_choice": ["yes", "no"]}, "choice", '["yes","no"]'),
    ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
    ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", json.dumps(
        SCHEMA, separators=(",", ":"))),
    ({"structured_outputs": {"grammar": 'root ::= "b"'}}, "grammar", 'root ::= "b"'),
    ({"response_format": TAG}, "structural_tag", TAG_TEXT),
    ({"structured_outputs": {"structural_tag": TAG_TEXT}}, "structural_tag", TAG_TEXT),
    ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", TAG_TEXT),
]  # fmt: skip


@pytest.mark.parametrize(("body", "kind", "text"), CASES)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_structure_reaches_the_engine(
    server: Server, path: str, body: dict[str, Any], kind: str, text: str
) -> None:
    prompt = {"prompt": "x"} if path == "completions" else {"messages": [USER]}
    answer = httpx.post(
        f"{server.url}/v1/{path}", json={"model": "tiny", "max_tokens": 2, **prompt, **body}
    )
    assert answer.status_code == 200, answer.text
    structure = server.engine.log.submitted[0].sampling.structure
    assert structure is not None
    assert (structure.kind, structure.text) == (kind, text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a" * 1_000_000}, "guided_regex"),
        ({"guided_choice": ["a" * 1_000_000]}, "guided_choice"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "no type"}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_invalid_structure_is_rejected_by_the_clients_name_for_it(
    server: Server, body: dict[str, Any], param: str
) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x", **body}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "structure " not in error["message"].replace("structured", "")
    assert server.engine.log.submitted == []


def test_stop_is_included_in_the_text_on_request(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 60, "stop": " fox"}
    for wanted, text in ((False, "The quick brown"), (True, "The quick brown fox")):
        answer = http.post(
            "/v1/completions", json={**body, "include_stop_str_in_output": wanted}
        ).json()
        assert answer["choices"][0]["text"] == text


def test_special_tokens_are_included_on_request(http: httpx.Client, server: Server) -> None:
    server.engine.script = lambda request, index: [2, 3, 1]
    body = {"model": "tiny", "prompt": "x", "skip_special_tokens": False}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "<|user|><|assistant|>"


TEMPLATE = (
    "<|system|>{{ documents[0].text if documents }}{{ mood }}{% for message in messages %}"
    "<|user|>{{ message.content }}{{ eos_token }}{% endfor %}"
)
BODY: dict[str, Any] = {  # Any: JSON
    "model": "tiny",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "hello <|user|>"}],
    "chat_template": TEMPLATE,
}


class TrustingServer(Server):
    """A server that takes the templates of requests."""

    def config(self, context: int) -> EngineConfig:
        return replace(super().config(context), trust_request_chat_template=True)


@pytest.fixture(scope="module")
def trusting_server(tokenizer: Tokenizer) -> Iterator[Server]:
    with TrustingServer(tokenizer) as server:
        yield server


def rejection(server: Server, **fields: object) -> tuple[str, str | None]:
    """Return the message and the parameter of a rejected body."""
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error["param"]


def test_prompt_is_rendered_by_the_template_of_the_request(trusting_server: Server) -> None:
    trusting_server.engine.reset()
    fields = {"chat_template_kwargs": {"mood": "quick "}, "documents": [{"text": "The "}]}
    answer = httpx.post(f"{trusting_server.url}/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    (request,) = trusting_server.engine.log.submitted
    tokenizer = trusting_server.tokenizer
    text = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|system|>The quick <|user|>hello <|user|></s>"
    # Special tokens of the template are tokens, those of a message are text.
    user = tokenizer.token_id_of("<|user|>")
    assert request.prompt_token_ids.count(user) == 1
    body = {name: BODY[name] for name in ("model", "messages", "chat_template")}
    counted = httpx.post(f"{trusting_server.url}/tokenize", json=body | fields).json()
    assert tuple(counted["tokens"]) == request.prompt_token_ids


def test_grpc_renders_the_same_prompt(trusting_server: Server) -> None:
    trusting_server.engine.reset()
    fields = {"chat_template_kwargs": {"mood": "quick "}, "documents": [{"text": "The "}]}
    httpx.post(f"{trusting_server.url}/v1/chat/completions", json=BODY | fields)
    message = pb.ChatRequest(
        messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello <|user|>")],
        sampling=pb.SamplingParams(max_tokens=2),
        chat_template=TEMPLATE,
        chat_template_kwargs='{"mood": "quick "}',
        documents=['{"text": "The "}'],
    )
    with grpc.insecure_channel(trusting_server.grpc_target) as channel:
        list(pagedray_pb2_grpc.GenerationServiceStub(channel).Chat(message))
    over_http, over_grpc = trusting_server.engine.log.submitted
    assert over_grpc.prompt_token_ids == over_http.prompt_token_ids


def test_grpc_tokenizes_with_the_template_of_the_request(trusting_server: Server) -> None:
    fields = {
        "messages": BODY["messages"],
        "chat_template_kwargs": {"mood": "quick "},
        "chat_template": TEMPLATE,
        "documents": [{"text": "The "}],
    }
    over_http = httpx.post(f"{trusting_server.url}/tokenize", json=fields)
    conversation = pb.Conversation(
        messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello <|user|>")],
        chat_template=TEMPLATE,
        chat_template_kwargs='{"mood": "quick "}',
        documents=['{"text": "The "}'],
    )
    with grpc.insecure_channel(trusting_server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        over_grpc = stub.Tokenize(pb.TokenizeRequest(conversation=conversation))
    assert list(over_grpc.token_ids) == over_http.json()["tokens"]
    text = trusting_server.tokenizer.decode(over_grpc.token_ids, skip_special_tokens=False)
    assert text == "<|system|>The quick <|user|>hello <|user|></s>"


def test_messages_that_the_template_rejects_are_rejected(trusting_server: Server) -> None:
    source = "{{ raise_exception('Only two.') }}"
    assert rejection(trusting_server, chat_template=source) == (
        "The request's chat template rejected the messages: Only two.",
        "messages",
    )


@pytest.mark.parametrize("source", ["", "{{ nothing }}"])
def test_empty_prompts_are_rejected(trusting_server: Server, source: str) -> None:
    assert rejection(trusting_server, chat_template=source) == (
        "The chat template renders these messages to an empty prompt.",
        "messages",
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ '' ", "The request has an invalid chat template: unexpected end of template, expected "
         "'end of print statement'."),
        ("x" * 40_000, "chat_template may have at most 32768 characters, not 40000."),
    ],
)  # fmt: skip
def test_invalid_templates_are_rejected(trusting_server: Server, source: str, message: str) -> None:
    assert rejection(trusting_server, chat_template=source) == (message, "chat_template")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ 'a' * 10**10 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_of_requests_run_in_the_sandbox(trusting_server: Server, source: str) -> None:
    message, param = rejection(trusting_server, chat_template=source)
    assert message.startswith("The request's chat template ")
    assert param == "messages"
