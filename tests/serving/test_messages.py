"""Anthropic's Messages API: what the model reads, what clients get, and what is rejected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic_core import from_json

from cluster.serving.anthropic.conversation_body import merge_system_messages
from cluster.serving.text.chat_template import ChatTemplate
from cluster.serving.text.template_arguments import ChatMessage
from tests.serving.conftest import TEXT, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

TEMPLATE = (
    "{# <tool_call> #}"
    "{% if tools %}[{{ tools | map(attribute='function.name') | join }}]{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }} {% endif %}"
    "{% for message in messages %}{{ message.role }}({{ message.reasoning_content }})"
    "{{ message.tool_call_id }}={{ message.content }}"
    "{% for call in message.tool_calls or [] %}!{{ call.function.name }}"
    "{{ call.function.arguments }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
BODY: dict[str, Any] = {  # Any: JSON
    "model": "tiny",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "hi"}],
}
TOOL = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": [1, null]}}\n</tool_call>'
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": None}}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}


def posted(server: Server, body: dict[str, Any], path: str = "messages") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def events(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the data of a stream's events, each of which has its type as its name."""
    found: list[dict[str, Any]] = []
    for event in posted(server, body | {"stream": True}).text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({}, "user()=hi;>"),
    ({"system": "Be brief."}, "system()=Be brief.;user()=hi;>"),
    ({"system": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}},
                 {"type": "text", "text": "B"}]}, "system()=AB;user()=hi;>"),
    # The first block of Claude Code's requests, which may differ between conversations.
    ({"system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=4af1;"},
                 {"type": "text", "text": "Be x-anthropic-billing-header: brief."}]},
     "system()=Be x-anthropic-billing-header: brief.;user()=hi;>"),
    ({"tools": [TOOL]}, "[look]user()=hi;>"),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "user()=hi;>"),
    ({"thinking": {"type": "disabled"}}, "False user()=hi;>"),
    ({"chat_template_kwargs": {"enable_thinking": "odd"}, "thinking": {"type": "disabled"}},
     "odd user()=hi;>"),
    ({"thinking": {"type": "adaptive", "block_binding": {}}, "fallbacks": "default"},
     "user()=hi;>"),
    ({"output_config": {"effort": "low"}}, "True user()=hi;>"),
    ({"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}, "True user()=hi;>"),
    ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, "False user()=hi;>"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True user()=hi;>"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "ok"},
        USE]}, {"role": "user", "content": [{**RESULT, "content": "5"},
        {"type": "text", "text": "go on"}]}]},
     "user()=x;assistant(hm)=ok!look{'a': None};tool()c1=5;user()=go on;>"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [USE]},
                   {"role": "user", "content": [{**RESULT, "is_error": True,
                    "content": [{"type": "text", "text": "no"}]}]}]},
     "user()=x;assistant()=!look{'a': None};tool()c1=Error: no;>"),
    # As with Anthropic, consecutive messages of a role are one turn.
    ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [
        {"type": "text", "text": "y"}, {**RESULT, "content": "5"}]},
        {"role": "user", "content": [{**RESULT, "content": "6"}]}, {"role": "user", "content": "z"},
        {"role": "user", "content": "!"}]},
     "user()=x\n\ny;tool()c1=5;tool()c1=6;user()=z\n\n!;>"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ok"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "ah"}, USE]},
        {"role": "user", "content": [{**RESULT, "content": "5"}]}]},
     "user()=x;assistant(hm\n\nah)=ok!look{'a': None};tool()c1=5;>"),
    # A response may have no content, and clients send it back.
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": []},
                   {"role": "user", "content": "y"}]}, "user()=x;assistant()=;user()=y;>"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": []}]},
     "user()=x;assistant()="),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), PROMPTS)
def test_template_reads_the_conversation(
    tool_server: Server, given: dict[str, Any], text: str
) -> None:
    tool_server.engine.reset()
    assert posted(tool_server, BODY | given).status_code == 200
    (request,) = tool_server.engine.log.submitted
    assert tool_server.tokenizer.decode(request.prompt_token_ids) == text
    counted = {name: one for name, one in (BODY | given).items() if name != "max_tokens"}
    answer = posted(tool_server, counted, "messages/count_tokens").json()
    assert answer == {"input_tokens": len(request.prompt_token_ids)}


def test_answer_continues_the_assistant(tool_server: Server) -> None:
    tool_server.engine.reset()
    given = {"messages": [*BODY["messages"], {"role": "assistant", "content": "I say"}]}
    assert posted(tool_server, BODY | given).status_code == 200
    (request,) = tool_server.engine.log.submitted
    text = tool_server.tokenizer.decode(request.prompt_token_ids)
    assert text == "user()=hi;assistant()=I say"


def test_message_has_their_shape(tool_server: Server) -> None:
    tool_server.engine.reset()
    tool_server.engine.num_cached_tokens = 3
    tool_server.say("Hello.")
    answer = posted(tool_server, BODY | {"max_tokens": 50})
    message = answer.json()
    assert message["id"] == f"msg_{answer.headers['x-request-id']}"
    # Anthropic's libraries read this header.
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert message["content"] == [{"type": "text", "text": "Hello.", "citations": None}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] == 3
    (request,) = tool_server.engine.log.submitted
    assert usage["input_tokens"] + 3 == len(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("given", "reason", "stop"),
    [({"max_tokens": 2}, "max_tokens", None),
     ({"stop_sequences": ["fox"], "max_tokens": 60}, "stop_sequence", "fox")],
)  # fmt: skip
def test_stop_reasons(
    tool_server: Server, given: dict[str, Any], reason: str, stop: str | None
) -> None:
    tool_server.engine.reset()
    message = posted(tool_server, BODY | given).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    *_, changed, last = events(tool_server, BODY | given)
    assert changed["delta"] == {"stop_reason": reason, "stop_sequence": stop}
    assert last == {"type": "message_stop"}


def test_stream_joins_to_the_message(tool_server: Server) -> None:
    tool_server.engine.reset()
    whole = posted(tool_server, BODY | {"max_tokens": 40}).json()
    first, start, *deltas, stop, changed, last = events(tool_server, BODY | {"max_tokens": 40})
    assert (first["type"], first["message"]["content"]) == ("message_start", [])
    assert first["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert start["content_block"] == {"type": "text", "text": ""}
    text = "".join(one["delta"]["text"] for one in deltas)
    assert text == whole["content"][0]["text"]
    assert TEXT.startswith(text[:20])
    assert stop == {"type": "content_block_stop", "index": 0}
    assert changed["usage"]["output_tokens"] == 40
    assert last["type"] == "message_stop"


def test_stream_has_the_id_of_its_request(tool_server: Server) -> None:
    tool_server.engine.reset()
    answer = posted(tool_server, BODY | {"stream": True})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert f'"id":"msg_{answer.headers["request-id"]}"' in answer.text


@pytest.mark.slow
def test_stream_that_waits_has_pings(tool_server: Server) -> None:
    tool_server.engine.reset()
    tool_server.engine.is_paused = True
    url = f"{tool_server.url}/v1/messages"
    with httpx.stream("POST", url, json=BODY | {"stream": True}, timeout=60.0) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: ping"
        assert next(lines) == 'data: {"type":"ping"}'
        tool_server.engine.is_paused = False
        names = [line for line in lines if line.startswith("event: ")]
    assert names[0] == "event: message_start"
    assert names[-1] == "event: message_stop"


def test_tools_are_called(tool_server: Server) -> None:
    tool_server.engine.reset()
    tool_server.say(f"I look. {CALL}")
    body = BODY | {"tools": [TOOL], "max_tokens": 200}
    message = posted(tool_server, body).json()
    text, use = message["content"]
    assert text["text"] == "I look."
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "look", {"a": [1, None]})
    assert message["stop_reason"] == "tool_use"
    found = events(tool_server, body)
    starts = [one["content_block"]["type"] for one in found if one["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    pieces = [one["delta"]["partial_json"] for one in found if one.get("index") == 1
              and one["type"] == "content_block_delta"]  # fmt: skip
    assert json.loads("".join(pieces)) == {"a": [1, None]}
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_salt_and_variables_of_vllm_are_those_of_the_request(tool_server: Server) -> None:
    tool_server.engine.reset()
    tool_server.say("ok")
    for given in ({}, {"cache_salt": "a", "vllm_xargs": {"x": 1}}):
        assert posted(tool_server, BODY | given).status_code == 200
    plain, salted = tool_server.engine.log.submitted
    assert salted.prompt_token_ids == plain.prompt_token_ids
    assert (plain.cache_salt, salted.cache_salt) == ("", "a")
    counted = {"messages": BODY["messages"], "model": "tiny"}
    numbers = [
        posted(tool_server, counted | given, "messages/count_tokens").json()["input_tokens"]
        for given in ({}, {"chat_template_kwargs": {"enable_thinking": "on"}})
    ]
    assert numbers[0] < numbers[1]


def test_calls_of_strict_tools_follow_the_schema(tool_server: Server) -> None:
    tool_server.engine.reset()
    tool_server.say(CALL)
    strict = TOOL | {"strict": True}
    assert posted(tool_server, BODY | {"tools": [strict]}).status_code == 200
    structure = tool_server.engine.log.submitted[-1].sampling.structure
    assert structure is not None
    assert (structure.kind, structure.mark) == ("calls", "<tool_call>")
    strict = strict | {"input_schema": {"type": "object", "not": {}}}
    rejected = posted(tool_server, BODY | {"tools": [strict]})
    assert rejected.status_code == 400
    assert "tools has the strict tool 'look', which" in rejected.json()["error"]["message"]


@pytest.mark.parametrize(
    ("end", "given"),
    [
        ('[1, "b', {"a": [1]}),
        ('[1], "b": 2', {"a": [1], "b": 2}),
        ("", {}),
    ],
)
def test_call_that_is_cut_off_has_what_is_complete(
    tool_server: Server, end: str, given: dict[str, Any]
) -> None:
    tool_server.engine.reset()
    text = f'<tool_call>\n{{"name": "look", "arguments": {{"a": {end}'
    tool_server.say(f"{text}9")
    num_tokens = len(tool_server.tokenizer.encode(text, add_special_tokens=False))
    body = BODY | {"tools": [TOOL], "max_tokens": num_tokens}
    whole = posted(tool_server, body).json()
    assert whole["stop_reason"] == "max_tokens"
    assert [(block["type"], block["input"]) for block in whole["content"]] == [("tool_use", given)]
    streamed = events(tool_server, body)
    pieces = [event["delta"].get("partial_json", "") for event in streamed if "delta" in event]
    # What Anthropic's library does with the parts of a stream.
    assert from_json("".join(pieces), allow_partial=True) == given


def test_hints_are_ignored(tool_server: Server) -> None:
    given = {"metadata": {"user_id": "u"}, "service_tier": "auto"}
    assert posted(tool_server, BODY | given).status_code == 200


@pytest.mark.parametrize(("name", "value"), [("budget_tokens", 1024), ("display", "omitted")])
def test_thinking_that_the_server_cannot_change_counts_as_ignored(
    tool_server: Server, name: str, value: object
) -> None:
    given = {"thinking": {"type": "enabled", name: value}}
    assert posted(tool_server, BODY | given).status_code == 200
    metrics = httpx.get(f"{tool_server.url}/metrics").text
    assert f'pagedray_ignored_parameters_total{{parameter="thinking.{name}"}}' in metrics


@pytest.mark.parametrize(
    "given",
    [{"context_management": {}}, {"context_management": {"edits": []}}, {"mcp_servers": []}],
)
def test_values_without_effect_are_accepted(tool_server: Server, given: dict[str, Any]) -> None:
    assert posted(tool_server, BODY | given).status_code == 200


def test_thoughts_are_kept_on_request(tool_server: Server) -> None:
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    given = {"context_management": {"edits": [edit]}}
    assert posted(tool_server, BODY | given).status_code == 200
    given["context_management"]["edits"][0]["keep"] = "none"
    assert posted(tool_server, BODY | given).status_code == 400


CASES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is required."),
    ({"max_tokens": 0}, "max_tokens must be 1 or more, not 0."),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}},
     "thinking.budget_tokens must be 0 or more, not -1."),
    ({"thinking": {"type": "adaptive", "budget_tokens": 1024}},
     "thinking.budget_tokens requires thinking.type = enabled."),
    ({"thinking_token_budget": 5},
     "thinking_token_budget is not supported: did you mean thinking.budget_tokens?"),
    ({"compaction": {"type": "summarize"}},
     "compaction is not supported: shorten the messages instead."),
    ({"seed": 5}, "seed is not supported: use /v1/chat/completions."),
    ({"fallbacks": [{"model": "other"}]}, "fallbacks is not supported: the server has one model."),
    ({"chat_template_kwargs": []}, "chat_template_kwargs must be an object of at most 64 entries."),
    ({"enable_thinking": True},
     "enable_thinking is not supported: did you mean chat_template_kwargs.enable_thinking?"),
    ({"stop_sequences": [""]}, "stop_sequences must contain strings of 1 to 512 characters."),
    ({"messages": [{"role": "god", "content": "x"}]},
     "messages.0.role must be one of 'user', 'assistant' or 'system', not 'god'."),
    ({"messages": [{"role": "system", "content": [RESULT]}]},
     "messages.0.content.0 must be a text block, not tool_result."),
    ({"messages": [{"role": "user", "content": 5}]},
     "messages.0.content must be a string or a list of content blocks."),
    ({"messages": [{"role": "user", "content": []}]},
     "messages.0.content must contain at least one content block."),
    *(({"messages": [{"role": "user", "content": [{"type": kind, "source": {}}]}]},
       f"messages.0.content.0 is not supported: the model only reads text, not {kind} blocks.")
      for kind in ("image", "document", "container_upload", "video", "audio")),
    ({"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]},
     "messages.0.content.0.content.0 is not supported: the model only reads text, not image "
     "blocks."),
    ({"system": [{"type": "image"}]},
     "system.0 is not supported: the model only reads text, not image blocks."),
    ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]},
     "messages.0.content.0 is not supported: content blocks of server_tool_use; the model reads "
     "redacted_thinking, text, thinking, tool_result, tool_use."),
    ({"messages": [{"role": "user", "content": [USE]}]},
     "messages.0.content.0 of type tool_use requires role = assistant."),
    ({"messages": [{"role": "assistant", "content": [{**USE, "input": "x"}]}]},
     "messages.0.content.0.input must be an object."),
    ({"system": 5}, "system must be a string or a list of text blocks."),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools.0.type must be custom: tools run by Anthropic are not available."),
    ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]},
     "tools.0.name must be 1 to 128 letters, digits, underscores, dashes or dots."),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema is required."),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}},
     "tool_choice names 'b', which is not in tools."),
    ({"mcp_servers": [{"type": "url", "url": "https://a.com", "name": "a"}]},
     "mcp_servers is not supported: tools run by Anthropic are not available."),
    ({"output_config": {"format": {"type": "json_schema"}}},
     "output_config.format.schema is required."),
    ({"output_config": {"format": "json_schema"}},
     "output_config.format must be an object, not 'json_schema'."),
    ({"output_config": {"format": {"type": "json_schema", "schema": "object"}}},
     "output_config.format.schema must be a JSON Schema."),
    ({"output_format": {"type": "json_schema"}},
     "output_format is not supported: did you mean output_config.format?"),
    ({"stop_sequence": ["a"]}, "stop_sequence is not supported: did you mean stop_sequences?"),
    # The words by which agents know that a conversation is too long.
    ({"messages": [{"role": "user", "content": "~" * 3000}]},
     "prompt is too long: 3008 tokens > 1023 maximum"),
    ({"messages": [{"role": "user", "content": "~" * 1_000_000}]},
     "prompt is too long: messages has 1000009 characters, but the context of 1024 tokens holds at "
     "most 13312."),
    ({"max_tokens": 32000},
     "input length and `max_tokens` exceed context limit: 10 + 32000 > 1024, decrease input length "
     "or `max_tokens` and try again"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), CASES)
def test_bad_input_is_rejected_in_their_shape(
    tool_server: Server, given: dict[str, Any], text: str
) -> None:
    tool_server.engine.reset()
    answer = posted(tool_server, BODY | given)
    assert answer.status_code == 400
    assert answer.json() == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": text},
        "request_id": answer.headers["request-id"],
    }
    assert tool_server.engine.log.submitted == []


def test_other_errors_have_their_shape(tool_server: Server, tmp_path: Path) -> None:
    answer = posted(tool_server, BODY | {"model": "other"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    answer = httpx.get(f"{tool_server.url}/v1/messages")
    assert (answer.status_code, answer.json()["type"]) == (405, "error")
    answer = httpx.get(f"{tool_server.url}/v1/other")
    assert set(answer.json()) == {"error"}
    assert "request-id" not in answer.headers


@pytest.mark.parametrize("path", ["/", "/batches", "/batches/b1/results", "/count_tokens/"])
def test_missing_endpoints_below_theirs_have_their_shape(tool_server: Server, path: str) -> None:
    answer = httpx.get(f"{tool_server.url}/v1/messages{path}", headers={"x-request-id": "mine"})
    assert answer.status_code == 404
    assert answer.headers["request-id"] == "mine"
    body = answer.json()
    assert (body["type"], body["request_id"]) == ("error", "mine")
    assert body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_their_tool_runner_learns_that_there_are_no_threads(
    tool_server: Server, thread: dict[str, str]
) -> None:
    answer = posted(tool_server, BODY | {"thread": thread})
    assert answer.status_code == 400
    # Their library then sends the request again, without a thread.
    assert answer.json()["error"] == {
        "type": "invalid_request_error",
        "message": "thread is not supported: messages are not stored; send the whole conversation.",
        "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    }


def test_one_message_may_not_become_more_than_the_context_has_tokens(tool_server: Server) -> None:
    message = {"role": "user", "content": [RESULT | {"content": "x"}] * 1025}
    answer = posted(tool_server, BODY | {"messages": [message]})
    assert answer.status_code == 400
    text = answer.json()["error"]["message"]
    assert text.startswith("prompt is too long: messages may have at most 1024 entries")


EACH = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
FIRST_ONLY = (
    "{# <tool_call> #}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('Not first.') }}{% endif %}"
    "{{ m.role }}={{ m.content }};{% endfor %}"
)
TO_THE_FRONT = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }};{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"
)
LEFT_OUT = "{% for m in messages if m.role != 'system' or loop.first %}{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    with Server(template_tokenizer(FIRST_ONLY), context=1024) as server:
        yield server


@pytest.mark.parametrize(
    ("source", "keeps"),
    [(EACH, True), (FIRST_ONLY, False), (TO_THE_FRONT, False), (LEFT_OUT, False)],
)
def test_templates_show_whether_they_keep_system_messages(source: str, *, keeps: bool) -> None:
    assert ChatTemplate(source, {}, origin="").keeps_system_messages is keeps


def roles(letters: str) -> list[ChatMessage]:
    """Return messages with numbers as their texts, given by the letters of their roles."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [ChatMessage(names[letter], str(place)) for place, letter in enumerate(letters)]


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ("sua", ["system 0", "user 1", "assistant 2"]),
        ("ssu", ["system 0 1", "user 2"]),
        ("us", ["user 0 1"]),
        ("usas", ["user 0 1", "assistant 2", "user 3"]),
        ("uasu", ["user 0", "assistant 1", "user 2 3"]),
        ("usssa", ["user 0 1 2 3", "assistant 4"]),
        ("uatsa", ["user 0", "assistant 1", "tool 2 3", "assistant 4"]),
        # The result still follows the call.
        ("uasts", ["user 0", "assistant 1", "tool 3 2 4"]),
        ("uasa", ["user 0", "assistant 1", "user 2", "assistant 3"]),
        ("s", ["system 0"]),
    ],
)
def test_later_system_messages_stay_at_their_places(given: str, merged: list[str]) -> None:
    found = merge_system_messages(roles(given))
    assert [f"{one.role} {one.content}" for one in found] == [
        text.replace(" ", "\n\n").replace("\n\n", " ", 1) for text in merged
    ]


@pytest.mark.parametrize("number", range(1, 12))
def test_a_conversation_begins_like_its_earlier_turns(number: int) -> None:
    whole = merge_system_messages(roles("suasuasuatsa"))
    earlier = merge_system_messages(roles("suasuasuatsa"[:number]))
    # Only the last turn may still become longer.
    assert whole[: len(earlier) - 1] == earlier[:-1]


CONVERSATIONS: list[tuple[list[dict[str, Any]], str]] = [  # Any: JSON
    ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
     "system=S;user=a\n\nb;"),
    ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"},
      {"role": "user", "content": "c"}], "system=S;user=a\n\nb\n\nc;"),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": [USE]},
      {"role": "user", "content": [{**RESULT, "content": "5"}]},
      {"role": "system", "content": [{"type": "text", "text": "b"}]}],
     "system=S;user=a;assistant=;tool=5\n\nb;"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "text"), CONVERSATIONS)
def test_a_template_that_rejects_them_gets_them_in_other_messages(
    server: Server, messages: list[dict[str, Any]], text: str
) -> None:
    server.engine.reset()
    body = {"model": "tiny", "max_tokens": 4, "system": "S", "messages": messages}
    assert posted(server, body).status_code == 200
    (request,) = server.engine.log.submitted
    assert server.tokenizer.decode(request.prompt_token_ids) == text
    del body["max_tokens"]
    counted = posted(server, body, "messages/count_tokens").json()
    assert counted == {"input_tokens": len(request.prompt_token_ids)}


@pytest.fixture(scope="module")
def tool_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    """A server of a model that calls tools, whose template writes all that it gets."""
    with Server(template_tokenizer(TEMPLATE), context=1024) as server:
        yield server
