"""Parameters that clients of OpenAI and vLLM send: what each does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai.types import (
    chat,
    completion_create_params,
    embedding_create_params,
    responses,
    shared_params,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_input_item_param

from cluster.serving.json_body import Body, OpenPart
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.openai.bodies.generation_body import StreamOptions
from cluster.serving.openai.bodies.messages import (
    Function,
    Message,
    MessageCall,
    RefusalPart,
    TextPart,
    ToolObject,
)
from cluster.serving.openai.bodies.sampling_fields import IGNORED
from cluster.serving.openai.bodies.score_body import EmbeddingBody
from cluster.serving.responses.input_body import Reasoning, TextConfig, TextFormat
from cluster.serving.responses.items import ITEMS, FunctionTool, NamespaceTool
from cluster.serving.responses.responses_body import InputTokensBody, ResponsesBody
from cluster.serving.text.chat_template import ChatTemplate
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt
from scripts.compatibility import DOCUMENT, document_with_tables
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import openai

    from cluster.serving.json_body import BodyPart
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.request import Request

TEMPLATE = (
    "{% if documents %}{{ documents[0].text }}{% endif %}"
    "{% if enable_thinking is defined %}{{ 'slow ' if enable_thinking else 'quick ' }}{% endif %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }} {% endif %}"
    "{% for message in messages %}{{ message.name }}:{{ message.reasoning_content }}:"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments }}"
    "{% endfor %}{% endfor %}"
)
CHAT: dict[str, Any] = {  # Any: JSON
    "model": "tiny",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "hello"}],
}
TEXT: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "prompt": "hello"}  # Any: JSON


@pytest.fixture(scope="module")
def template_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    """A server of a model whose template reads what clients set."""
    with Server(template_tokenizer(TEMPLATE)) as server:
        yield server


def submitted(server: Server, path: str, body: dict[str, Any]) -> Request:
    """Return the request that a body becomes."""
    server.engine.reset()
    answer = httpx.post(f"{server.url}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    (request,) = server.engine.log.submitted
    return request


def prompt_of(server: Server, **given: object) -> str:
    """Return the text of a conversation's prompt."""
    request = submitted(server, "chat/completions", CHAT | given)
    return server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body"),
    [("completions", TEXT), ("chat/completions", CHAT), ("responses", {"input": "hello"})],
)
@pytest.mark.parametrize("model", [{}, {"model": None}])
def test_request_without_a_model_is_for_the_served_one(
    template_server: Server, path: str, body: dict[str, Any], model: dict[str, None]
) -> None:
    given = {name: one for name, one in body.items() if name != "model"} | model
    answer = httpx.post(f"{template_server.url}/v1/{path}", json=given)
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")


CALL = {"id": "1", "type": "function", "function": {"name": "a.b", "arguments": ""}, "index": 0}
PROMPTS: list[tuple[dict[str, Any], str]] = [  # Any: JSON
    ({}, "::hello"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "quick ::hello"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "slow ::hello"),
    ({"reasoning_effort": "low"}, "slow low ::hello"),
    ({"reasoning_effort": 0.25}, "slow 0.25 ::hello"),
    ({"reasoning_effort": 0}, "slow 0.0 ::hello"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
     "quick low ::hello"),
    ({"reasoning_effort": "none"}, "quick none ::hello"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "odd"}},
     "slow odd ::hello"),
    ({"documents": [{"text": "A fact. "}]}, "A fact. ::hello"),
    ({"messages": [{"role": "user", "content": "hi", "name": "Ada"}]}, "Ada::hi"),
    ({"messages": [{"role": "assistant", "content": "hi", "reasoning": "hm"}]}, ":hm:hi"),
    ({"messages": [{"role": "assistant", "content": "hi", "reasoning_content": "hm"}]}, ":hm:hi"),
    ({"messages": [{"role": "assistant", "content": None, "reasoning": "hm"}]}, ":hm:"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "::{}"),
    ({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]}, "::hi"),
    ({"messages": [{"role": "user", "content": ["hi", {"type": "text", "text": " "}, "ho"]}]},
     "::hi ho"),
    ({"messages": [{"role": "user", "content": [
        {"type": "input_text", "text": "hi"},
        {"type": "output_text", "text": " ho", "annotations": [], "logprobs": []}]}]}, "::hi ho"),
    ({"messages": [{"role": "assistant", "content": [
        {"type": "text", "text": "hi "}, {"type": "refusal", "refusal": "no"}]}]}, "::hi no"),
    ({"messages": [{"role": "assistant", "content": None, "refusal": "no"}]}, "::no"),
    ({"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}, "::no"),
    ({"messages": [{"role": "assistant", "content": "hi", "refusal": None}]}, "::hi"),
    ({"messages": [{"role": "assistant", "content": [
        {"type": "thinking", "thinking": "h", "closed": True},
        {"type": "thinking", "thinking": "m"}, {"type": "text", "text": "hi"}]}]}, ":hm:hi"),
    ({"messages": [{"role": "assistant", "reasoning": "hm", "content": [
        {"type": "thinking", "thinking": "hm"}]}]}, ":hm:"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), PROMPTS)
def test_template_reads_what_clients_set(
    template_server: Server, given: dict[str, Any], text: str
) -> None:
    assert prompt_of(template_server, **given) == text


def test_special_tokens_in_variables_are_text(template_server: Server) -> None:
    given = {"reasoning_effort": "<|system|>"}
    request = submitted(template_server, "chat/completions", CHAT | {"chat_template_kwargs": given})
    special = template_server.tokenizer.encode("<|system|>", add_special_tokens=False)
    assert len(special) == 1
    assert special[0] not in request.prompt_token_ids
    text = template_server.tokenizer.decode(request.prompt_token_ids)
    assert text.startswith("<|system|> ")


def test_template_names_its_variables() -> None:
    template = ChatTemplate(TEMPLATE + "{{ bos_token }}", {"bos_token": "<s>"}, origin="test")
    assert template.variables == {"documents", "enable_thinking", "reasoning_effort"}
    assert template.render(ChatPrompt((ChatMessage("user", "x"),))).endswith("x<s>")


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("name", sorted(IGNORED))
def test_hints_are_ignored(server: Server, path: str, name: str) -> None:
    body = CHAT if path == "chat/completions" else TEXT
    plain = submitted(server, path, body)
    hint = {"type": "content", "content": "x"} if name == "prediction" else {"a": 1}
    hinted = submitted(server, path, body | {name: hint})
    assert (hinted.prompt_token_ids, hinted.sampling) == (plain.prompt_token_ids, plain.sampling)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert f'pagedray_ignored_parameters_total{{parameter="{name}"}}' in metrics


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_fields_of_hints_that_would_change_the_output_are_rejected(
    server: Server, path: str
) -> None:
    body = CHAT if path == "chat/completions" else TEXT
    hints = {"annotations": ["llm_metrics"], "agent_hints": {"osl": 8}, "greed_sampling": False}
    assert submitted(server, path, body | {"nvext": hints})
    given = body | {"nvext": hints | {"max_thinking_tokens": 5}}
    answer = httpx.post(f"{server.url}/v1/{path}", json=given)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "nvext.max_thinking_tokens"
    assert error["message"] == (
        "nvext.max_thinking_tokens is not supported: use thinking_token_budget."
    )


def test_unread_variables_are_counted(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster.serving.telemetry.log_lines")
    given = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    # The server of other tests may have named them before.
    with Server(server.tokenizer) as new_server:
        for _ in range(2):
            submitted(new_server, "chat/completions", CHAT | given)
    assert [record.getMessage() for record in caplog.records] == [
        "Ignoring the parameter chat_template_kwargs, which has no effect on this server.",
        "Ignoring the parameter reasoning_effort, which has no effect on this server.",
    ]


@pytest.mark.parametrize(
    "given", [{"store": True}, {"chat_template_kwargs": {"x": 1}}, {"reasoning_effort": "low"}]
)
def test_strict_servers_reject_hints(strict_server: Server, given: dict[str, Any]) -> None:
    answer = httpx.post(f"{strict_server.url}/v1/chat/completions", json=CHAT | given)
    (name,) = given
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["message"] == (
        f"{name} has no effect on this server, and --strict-parameters rejects such parameters."
    )


@pytest.mark.parametrize(
    ("path", "given", "name"),
    [
        ("responses", {"input": "x", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("messages", CHAT | {"output_config": {"effort": "low"}}, "output_config.effort"),
    ],
)
def test_a_rejected_effort_has_the_clients_name(
    strict_server: Server, path: str, given: dict[str, Any], name: str
) -> None:
    answer = httpx.post(f"{strict_server.url}/v1/{path}", json={"model": "tiny"} | given)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{name} has no effect on this server")


@pytest.fixture(scope="module")
def strict_server(tokenizer: Tokenizer) -> Iterator[Server]:
    with Server(tokenizer, strict_parameters=True) as server:
        yield server


def test_sampling_takes_the_values_of_vllm(server: Server) -> None:
    request = submitted(server, "completions", TEXT | {"top_k": -1, "top_p": 0})
    assert request.sampling.is_greedy
    assert request.sampling.top_k == -1


def test_special_tokens_may_be_left_out(server: Server) -> None:
    with_bos = submitted(server, "completions", TEXT).prompt_token_ids
    without = submitted(server, "completions", TEXT | {"add_special_tokens": False})
    assert with_bos[1:] == without.prompt_token_ids


@pytest.mark.parametrize(("num_kept", "length"), [(5, 5), (-1, 256 - 2), (9999, 290)])
def test_prompts_are_truncated_at_either_side(server: Server, num_kept: int, length: int) -> None:
    given = TEXT | {"prompt": list(range(290)), "truncate_prompt_tokens": num_kept}
    if length > 256:
        answer = httpx.post(f"{server.url}/v1/completions", json=given)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        return
    request = submitted(server, "completions", given)
    assert request.prompt_token_ids == tuple(range(290 - length, 290))
    request = submitted(server, "completions", given | {"truncation_side": "right"})
    assert request.prompt_token_ids == tuple(range(length))


@pytest.mark.parametrize("bad", [320, -1, 2**70])
@pytest.mark.parametrize("num_kept", [5, -1])
def test_token_ids_that_remain_of_a_long_prompt_are_checked(
    server: Server, bad: int, num_kept: int
) -> None:
    given = TEXT | {"prompt": [5] * 290 + [bad], "truncate_prompt_tokens": num_kept}
    answer = httpx.post(f"{server.url}/v1/completions", json=given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    request = submitted(server, "completions", given | {"truncation_side": "right"})
    assert set(request.prompt_token_ids) == {5}


def test_conversations_are_truncated_at_either_side(server: Server) -> None:
    whole = submitted(server, "chat/completions", CHAT).prompt_token_ids
    for side, kept in (("left", whole[-3:]), ("right", whole[:3])):
        given = CHAT | {"truncate_prompt_tokens": 3, "truncation_side": side}
        assert submitted(server, "chat/completions", given).prompt_token_ids == kept


def test_salt_reaches_the_engine(server: Server) -> None:
    assert submitted(server, "completions", TEXT | {"cache_salt": "s"}).cache_salt == "s"
    # As long as in vLLM.
    longest = "s" * 1024
    assert submitted(server, "completions", TEXT | {"cache_salt": longest}).cache_salt == longest


@pytest.mark.parametrize("is_stream", [False, True])
def test_request_id_that_no_header_can_contain_is_rejected(
    server: Server, *, is_stream: bool
) -> None:
    given = TEXT | {"request_id": "a\u4e16", "stream": is_stream}
    answer = httpx.post(f"{server.url}/v1/completions", json=given)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "request_id"
    given["request_id"] = "a\u00e9"
    answer = httpx.post(f"{server.url}/v1/completions", json=given)
    assert answer.headers["x-request-id"] == "a\u00e9"


def test_request_id_is_the_calls_id(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=TEXT | {"request_id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json=TEXT | {"request_id": "mine"},
        headers={"x-request-id": "other"},
    )
    assert answer.json()["error"]["param"] == "request_id"


def test_every_chunk_reports_the_usage(openai_client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}  # Any: not in OpenAI's
    stream = openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        stream=True,
        stream_options=options,
    )
    chunks = list(stream)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert chunks[-1].choices == []
    assert counts[0] < 4


def test_token_ids_are_returned(server: Server, openai_client: openai.OpenAI) -> None:
    body = TEXT | {"max_tokens": 5, "return_token_ids": True}
    request = submitted(server, "completions", body)
    (choice,) = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"]
    assert choice["prompt_token_ids"] == list(request.prompt_token_ids)
    assert server.tokenizer.decode(choice["token_ids"]) == choice["text"]

    stream = openai_client.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=5,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    # Any: JSON.
    parts: list[dict[str, Any]] = [chunk.choices[0].to_dict() for chunk in stream]
    assert parts[0]["prompt_token_ids"] == list(request.prompt_token_ids)
    joined = [token_id for part in parts for token_id in part["token_ids"]]
    assert joined == choice["token_ids"]

    chat = httpx.post(
        f"{server.url}/v1/chat/completions", json=CHAT | {"return_token_ids": True}
    ).json()
    assert chat["prompt_token_ids"] == list(
        submitted(server, "chat/completions", CHAT).prompt_token_ids
    )
    assert len(chat["choices"][0]["token_ids"]) == 2


def test_tokens_are_named_by_id(server: Server) -> None:
    body = TEXT | {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert set(choice["logprobs"]["top_logprobs"][0]) == {names[0]}


def test_streams_may_begin_with_the_prompt(server: Server, openai_client: openai.OpenAI) -> None:
    plain = openai_client.completions.create(model="tiny", prompt="hello", max_tokens=5)
    stream = openai_client.completions.create(
        model="tiny", prompt="hello", max_tokens=5, stream=True, echo=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == "hello" + plain.choices[0].text
    echoed = openai_client.completions.create(
        model="tiny", prompt=["hello", "bye"], max_tokens=5, echo=True
    )
    assert echoed.choices[0].text == text
    assert echoed.choices[1].text.startswith("bye")


@pytest.mark.parametrize(("index", "number"), [(1, 1), (0, 3), (1, 2)])
def test_any_event_may_describe_the_prompt(server: Server, index: int, number: int) -> None:
    server.engine.describing_index, server.engine.describing_token = index, number
    body = {**TEXT, "max_tokens": 4, "n": 2, "prompt_logprobs": 0, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    server.engine.reset()
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"]) > 1


def test_nothing_is_generated_for_an_echo_alone(openai_client: openai.OpenAI) -> None:
    echoed = openai_client.completions.create(
        model="tiny", prompt=[40, 41, 42], max_tokens=0, echo=True
    )
    assert echoed.choices[0].finish_reason == "length"
    assert echoed.usage is not None
    assert (echoed.usage.prompt_tokens, echoed.usage.completion_tokens) == (3, 0)
    assert len(echoed.choices[0].text) == 3


# fmt: off
TYPES: list[tuple[type, type[BodyPart]]] = [
    (chat_params.CompletionCreateParamsBase, ChatBody),
    (chat_params.CompletionCreateParamsStreaming, ChatBody),
    (completion_create_params.CompletionCreateParamsBase, CompletionBody),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingBody),
    (response_create_params.ResponseCreateParamsBase, ResponsesBody),
    (responses.input_token_count_params.InputTokenCountParams, InputTokensBody),
    *((kind, Message) for kind in (
        chat.ChatCompletionSystemMessageParam, chat.ChatCompletionDeveloperMessageParam,
        chat.ChatCompletionUserMessageParam, chat.ChatCompletionAssistantMessageParam,
        chat.ChatCompletionToolMessageParam, chat.ChatCompletionFunctionMessageParam)),
    (chat.ChatCompletionContentPartTextParam, TextPart),
    (chat.ChatCompletionContentPartRefusalParam, RefusalPart),
    (chat.ChatCompletionMessageFunctionToolCallParam, MessageCall),
    (chat.ChatCompletionFunctionToolParam, ToolObject),
    (chat.ChatCompletionStreamOptionsParam, StreamOptions),
    (shared_params.FunctionDefinition, Function),
    (shared_params.Reasoning, Reasoning),
    (responses.EasyInputMessageParam, ITEMS["message"]),
    (responses.ResponseOutputMessageParam, ITEMS["message"]),
    (responses.ResponseFunctionToolCallParam, ITEMS["function_call"]),
    (response_input_item_param.FunctionCallOutput, ITEMS["function_call_output"]),
    (responses.ResponseReasoningItemParam, ITEMS["reasoning"]),
    (responses.ResponseInputTextParam, TextPart),
    (responses.ResponseOutputTextParam, TextPart),
    (responses.ResponseOutputRefusalParam, RefusalPart),
    (responses.FunctionToolParam, FunctionTool),
    (responses.NamespaceToolParam, NamespaceTool),
    (responses.ResponseTextConfigParam, TextConfig),
    (responses.ResponseFormatTextJSONSchemaConfigParam, TextFormat),
]
# fmt: on
HINTS = {
    *("annotations", "caller", "encrypted_content", "id", "logprobs", "output_schema", "phase"),
    *("prompt_cache_breakpoint", "status", "summary"),
}
"""Fields of messages and tools that change no answer."""


@pytest.mark.parametrize(("kind", "part"), TYPES)
def test_parameters_of_the_client_are_known(kind: type, part: type[BodyPart]) -> None:
    # Typed dictionaries know these names at run time only.
    names = {*kind.__required_keys__, *kind.__optional_keys__}  # type: ignore[attr-defined]
    known = {field.alias or name for name, field in part.model_fields.items()}
    if issubclass(part, Body):
        known = known.union(part.ignored, part.rejected, part.defaults)
    if issubclass(part, OpenPart):
        known = known.union(part.rejected, HINTS)
    assert names <= known


def test_tables_are_those_of_the_code() -> None:
    written = DOCUMENT.read_text()
    assert written == document_with_tables(written), "Run python -m scripts.compatibility."
