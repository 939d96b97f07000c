"""Fields of clients in messages, parts, calls, results and tools, which change no answer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cluster.serving.text.templates.template_code import compile_template
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer

Json = dict[str, Any]  # Any: JSON
TEMPLATE = (
    "{# <tool_call> #}{% for tool in tools or [] %}{{ tool | tojson }}"
    "{% if tool.function.x_cost is defined %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{{ message.tool_plan }}{{ message['weather'] }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %};{% endfor %}"
)
OWN: Json = {
    "id": "msg_1",
    "provider_specific_fields": {"a": None, "citations": [1]},
    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
    "reasoning_details": [],
    "cache_control": {"type": "ephemeral"},
    "cacheControl": {"type": "ephemeral"},
    "extra_content": {"google": {"thought_signature": "x"}},
    "index": "0",
    "status": "completed",
    "createdAt": 1735689600,
    "metadata": {"<|system|>": "<|system|>"},
    "annotations": [{"type": "url_citation", "url": "x"}],
    "logprobs": None,
    "parsed": {"a": 1},
    "parsed_arguments": {"a": 1},
    "usage": {"input_tokens": 5},
    "stop_reason": "end_turn",
    "model": "other",
    "caller": {"type": "direct"},
    "toolset_name": "x",
    "eager_input_streaming": True,
    "input_examples": [{"city": "Bonn"}],
    "output_schema": {"type": "object"},
    "short_description": "x",
    "tool_name": "x",
    "error": None,
    "title": "x",
    "copy": 1,
    "model_dump": 1,
    "x" * 100: 1,
    "a b\n": 1,
    **{f"field{number}": number for number in range(100)},
}
CHAT: Json = {
    "max_tokens": 4,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "hi"}, {"type": "text", "text": "."}]},
        {"role": "assistant", "content": "ho", "reasoning": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
    ],
    "tools": [{"type": "function", "function": {
        "name": "look", "parameters": {"type": "object", "properties": {}}}}],
}  # fmt: skip
BODIES: dict[str, tuple[Json, list[tuple[str | int, ...]]]] = {
    "/v1/chat/completions": (
        CHAT,
        [
            ("messages", 0),
            ("messages", 1),
            ("messages", 1, "content", 0),
            ("messages", 2),
            ("messages", 2, "tool_calls", 0),
            ("messages", 2, "tool_calls", 0, "function"),
            ("messages", 3),
            ("messages", 3, "content", 0),
            ("tools", 0),
            ("tools", 0, "function"),
        ],
    ),
    "/v1/responses": (
        {
            "max_output_tokens": 4,
            "input": [
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [
                    {"type": "input_text", "text": "5"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
                {"role": "user", "content": "go"},
            ],
            "tools": [
                {"type": "function", "name": "look"},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            ],
        },
        [
            *(("input", index) for index in range(6)),
            ("input", 0, "content", 0),
            ("input", 1, "content", 0),
            ("input", 3, "output", 0),
            ("input", 4, "content", 0),
            ("tools", 0),
            ("tools", 1),
            ("tools", 1, "tools", 0),
        ],
    ),
    "/v1/messages": (
        {
            "model": "tiny",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [
                        {"type": "text", "text": "5"}]}]},
            ],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        },
        [
            ("system", 0),
            *(("messages", index) for index in range(3)),
            ("messages", 0, "content", 0),
            *(("messages", 1, "content", index) for index in range(3)),
            ("messages", 2, "content", 0),
            ("messages", 2, "content", 0, "content", 0),
            ("tools", 0),
        ],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def own_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    with Server(template_tokenizer(TEMPLATE), context=2**15) as server:
        yield server


def with_fields(body: Json, place: tuple[str | int, ...], fields: Json) -> Json:
    """Return a body in which the object at a place has further fields."""
    changed = copy.deepcopy(body)
    found: Any = changed  # Any: objects and lists in turn
    for step in place:
        found = found[step]
    for name, value in fields.items():
        found.setdefault(name, value)
    return changed


def prompt_of(server: Server, path: str, body: Json) -> str:
    """Return the text of the prompt that a body becomes."""
    server.engine.reset()
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    [request] = server.engine.log.submitted
    return server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "place"), [(path, place) for path, (_, places) in BODIES.items() for place in places]
)
def test_fields_that_no_template_reads_change_nothing(
    own_server: Server, path: str, place: tuple[str | int, ...]
) -> None:
    body, _ = BODIES[path]
    plain = prompt_of(own_server, path, body)
    assert prompt_of(own_server, path, with_fields(body, place, OWN)) == plain
    with httpx.Client(base_url=own_server.url) as client:
        for name, value in OWN.items():
            # Alone, a field might be taken for a misspelled one.
            if not name.startswith("field"):
                answer = client.post(path, json=with_fields(body, place, {name: value}))
                assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_counts_take_the_same_fields(own_server: Server, path: str) -> None:
    body, places = BODIES["/v1/messages" if "messages" in path else "/v1/chat/completions"]
    body = {name: one for name, one in body.items() if name != "max_tokens"}
    counts = set()
    for place in ((), *places):
        fields = OWN if place else {}
        answer = httpx.post(f"{own_server.url}{path}", json=with_fields(body, place, fields))
        assert answer.status_code == 200, answer.text
        counts.add(answer.json().get("count") or answer.json()["input_tokens"])
    assert len(counts) == 1


def test_template_reads_the_fields_that_it_names(own_server: Server) -> None:
    fields = {"tool_plan": "First look.", "weather": "<|system|>", "tool_plans": "not read"}
    body = with_fields(CHAT, ("messages", 2), fields)
    prompt = prompt_of(own_server, "/v1/chat/completions", body)
    assert "assistant:hoFirst look.<|system|>" in prompt.replace("\n", "")
    assert "not read" not in prompt
    [request] = own_server.engine.log.submitted
    special = own_server.tokenizer.encode("<|system|>", add_special_tokens=False)
    assert special[0] not in request.prompt_token_ids


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/chat/completions", ("tools", 0, "function")),
        ("/v1/responses", ("tools", 0)),
        ("/v1/messages", ("tools", 0)),
    ],
)
def test_functions_keep_what_transformers_describes(
    own_server: Server, path: str, place: tuple[str | int, ...]
) -> None:
    body, _ = BODIES[path]
    given = {"return": {"type": "string", "x": None}, "x_cost": 5, "y_cost": 6}
    prompt = prompt_of(own_server, path, with_fields(body, place, given))
    assert '"return": {"type": "string", "x": null}, "x_cost": 5}' in prompt
    assert "y_cost" not in prompt


def test_own_fields_do_not_replace_a_message(own_server: Server) -> None:
    # As a template that names its own fields by strings.
    assert {"role", "content"} <= compile_template(TEMPLATE).names
    body = with_fields(CHAT, ("messages", 0), {"Role": "x", "CONTENT ": "x"})
    answer = httpx.post(f"{own_server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200


EMPTY: Json = {
    "tool_calls": [],
    "tool_call_id": "",
    "name": "",
    "reasoning": "",
    "reasoning_content": "",
    "refusal": "",
    "function_call": None,
    "audio": None,
    "images": [],
    "prefix": False,
}


@pytest.mark.parametrize("place", [("messages", 0), ("messages", 1), ("messages", 3)])
def test_empty_fields_are_as_none(own_server: Server, place: tuple[str | int, ...]) -> None:
    plain = prompt_of(own_server, "/v1/chat/completions", CHAT)
    assert prompt_of(own_server, "/v1/chat/completions", with_fields(CHAT, place, EMPTY)) == plain


REJECTED: list[tuple[str, tuple[str | int, ...], Json, str]] = [
    ("/v1/chat/completions", ("messages", 0), {"images": ["x"]},
     "messages.0.images is not supported: the model only reads text."),
    ("/v1/chat/completions", ("messages", 2), {"audio": {"id": "x"}},
     "messages.2.audio is not supported: the model only reads text."),
    ("/v1/chat/completions", ("messages", 2), {"prefix": True},
     "messages.2.prefix is not supported: use continue_final_message = true and "
     "add_generation_prompt = false."),
    ("/v1/chat/completions", ("messages", 2), {"partial": True},
     "messages.2.partial is not supported: use continue_final_message = true and "
     "add_generation_prompt = false."),
    ("/v1/chat/completions", ("messages", 1), {"toolCalls": [1]},
     "messages.1.toolCalls is not supported: did you mean tool_calls?"),
    ("/v1/chat/completions", ("tools", 0, "function"), {"descrption": "x"},
     "tools.0.function.descrption is not supported: did you mean description?"),
    ("/v1/messages", ("messages", 2, "content", 0), {"isError": True},
     "messages.2.content.0.isError is not supported: did you mean is_error?"),
    ("/v1/messages", ("tools", 0), {"descriptoin": "x"},
     "tools.0.descriptoin is not supported: did you mean description?"),
    ("/v1/responses", ("input", 2), {"name_space": "x"},
     "input.2.name_space is not supported: did you mean namespace?"),
    ("/v1/chat/completions", (), {"x": 1}, "x is not supported."),
    ("/v1/responses", (), {"x": 1}, "x is not supported."),
    ("/v1/messages", (), {"x": 1}, "x is not supported."),
    ("/v1/chat/completions", (), {"stream": True, "stream_options": {"x": 1}},
     "stream_options.x is not supported."),
    ("/v1/messages", (), {"tool_choice": {"type": "auto", "x": 1}},
     "tool_choice.x is not supported."),
]  # fmt: skip


@pytest.mark.parametrize(("path", "place", "fields", "text"), REJECTED)
def test_fields_that_would_change_the_answer_are_rejected(
    own_server: Server, path: str, place: tuple[str | int, ...], fields: Json, text: str
) -> None:
    body, _ = BODIES[path]
    answer = httpx.post(f"{own_server.url}{path}", json=with_fields(body, place, fields))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, text)
