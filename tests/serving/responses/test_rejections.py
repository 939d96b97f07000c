"""Input that the Responses API rejects, and limits on its size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.buffers import BufferLimits, ReaderLimits
from tests.serving.conftest import Server
from tests.serving.responses.response_calls import SPACE, TEMPLATE, TOOL, USE, posted

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.serving.text.tokenizer import Tokenizer


BAD_METADATA: list[object] = [
    [],
    {"a": 1},
    {"a": "b" * 513},
    {"a" * 65: "b"},
    {str(number): "" for number in range(17)},
]
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input is required.", "input"),
    ({"input": []}, "input must be a string or a non-empty list of items.", "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]},
     "input.0 is not supported: items of item_reference; the model reads function_call, "
     "function_call_output, message, reasoning.", "input.0"),
    ({"input": [None]}, "input.0 must be an object.", "input.0"),
    ({"input": [{"type": ["message"]}]},
     "input.0 is not supported: items of this kind; the model reads function_call, "
     "function_call_output, message, reasoning.", "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input.0.content.0 is not supported: the model only reads text, not input_image parts.",
     "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
     "input.0.content.0.type must be one of 'text', 'input_text' or 'output_text', not 'refusal'.",
     "input.0.content.0.type"),
    ({"input": [{**USE, "arguments": "[]"}]},
     "input.0.arguments must be a JSON object as a string.", "input.0.arguments"),
    ({"input": [{**USE, "arguments": '{"a": -1e400}'}]},
     "input.0.arguments has a number that exceeds the range of a double.", "input.0.arguments"),
    ({"previous_response_id": "resp_1"}, "Previous response with id 'resp_1' not found.",
     "previous_response_id"),
    ({"tools": [{"type": "web_search"}]},
     "tools.0.type must be function or namespace: OpenAI's own tools are not available.",
     "tools.0.type"),
    ({"tools": [{**SPACE, "tools": [{"type": "custom", "name": "x"}]}]},
     "tools.0.tools.0.type must be function: OpenAI's own tools are not available.",
     "tools.0.tools.0.type"),
    ({"tools": [{**SPACE, "tools": None}]}, "tools.0.tools is required.", "tools.0.tools"),
    ({"tools": [{**SPACE, "tools": [TOOL] * 1025}]},
     "tools.0.tools must be a list of at most 1024 functions.", "tools.0.tools"),
    ({"tools": [{**SPACE, "tools": [TOOL] * 600}, {**SPACE, "tools": [TOOL] * 600}]},
     "tools may have at most 1024 entries, not 1200.", "tools"),
    ({"tools": [{**SPACE, "name": "n" * 126}]},
     "tools.0.tools.0.name must be 1 to 128 letters, digits, underscores, dashes or dots.",
     "tools.0.tools.0.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
     "tool_choice.tools must be a list of 1 to 1024 tools.", "tool_choice.tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "b"}]}},
     "tool_choice names 'b', which is not in tools.", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}},
     "tool_choice.tools.0.type is required.", "tool_choice.tools.0.type"),
    ({"tools": [{**TOOL, "parameters": 5}]}, "tools.0.parameters must be a JSON Schema object.",
     "tools.0.parameters"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}},
     "text.format.schema must be a JSON Schema.", "text.format.schema"),
    ({"tools": [TOOL], "structured_outputs": {"grammar": 'root ::= "a"'}},
     "structured_outputs.grammar cannot be combined with tools: use a JSON schema, a regular "
     "expression or choices.", "structured_outputs.grammar"),
    ({"include": ["message.output_text.logprobs"]},
     "message.output_text.logprobs is not supported in include: use /v1/chat/completions.",
     "include"),
    *[({"include": ["reasoning.encrypted_content", one]},
       "include may contain code_interpreter_call.outputs, computer_call_output.output.image_url, "
       "file_search_call.results, message.input_image.image_url, reasoning.encrypted_content, "
       f"web_search_call.action.sources, web_search_call.results, not {shown}.", "include")
      for one, shown in (("reasoning", "'reasoning'"), ("", "''"), (None, "null"), ([], "a list"))],
    ({"stream": True, "stream_options": {"resumable": True}},
     "stream_options.resumable is not supported: use /v1/chat/completions.",
     "stream_options.resumable"),
    ({"include": ["x"] * 65}, "include may have at most 64 entries, not 65.", "include"),
    ({"include": "reasoning"}, "include must be a list of strings.", "include"),
    *[({"metadata": one},
       "metadata must be an object of at most 16 strings of up to 512 characters, with names of up "
       "to 64.", "metadata")
      for one in BAD_METADATA],
    ({"max_output_tokens": 0}, "max_output_tokens must be 1 or more, not 0.", "max_output_tokens"),
    ({"input": "~" * 3000},
     "input has 3008 tokens, but the context length of 1024 allows at most 1023 and one generated "
     "token.", "input"),
    ({"top_k": -2}, "top_k must be -1 or more, not -2.", "top_k"),
    ({"stop": [""]}, "stop must contain strings of 1 to 512 characters.", "stop"),
    ({"max_tokens": 5}, "max_tokens is not supported: did you mean max_output_tokens?",
     "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text", "param"), CASES)
def test_bad_input_is_rejected(
    tool_server: Server, given: dict[str, Any], text: str, param: str
) -> None:
    tool_server.engine.reset()
    answer = posted(tool_server, given)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (400, text, param)
    assert tool_server.engine.log.submitted == []


def test_more_than_a_tenant_may_keep_is_rejected(
    template_tokenizer: Callable[..., Tokenizer],
) -> None:
    limits = ReaderLimits(unread_buffer=BufferLimits(total_bytes=2**19))
    tools = [TOOL | {"name": f"f{number}", "description": "x" * 60_000} for number in range(3)]
    with Server(template_tokenizer(TEMPLATE), reader_limits=limits) as server:
        answer = posted(server, {"tools": tools, "tool_choice": "none"})
        assert answer.status_code == 400
        assert "exceeds 131072 bytes" in answer.json()["error"]["message"]
        assert not server.frontends.servicer.buffers.num_bytes
