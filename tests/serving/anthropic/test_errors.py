"""Bad requests are rejected in the shape of Anthropic's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serving.anthropic.message_calls import (
    BODY,
    RESULT,
    TOOL,
    USE,
    posted,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.serving.conftest import Server


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
