"""Anthropic's Messages API: what the model reads, what clients get, and what is rejected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic_core import from_json

from tests.serving.anthropic.message_calls import (
    BODY,
    CALL,
    RESULT,
    TOOL,
    USE,
    events,
    posted,
)
from tests.serving.checkpoint import TEXT

if TYPE_CHECKING:
    from tests.serving.conftest import Server


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
