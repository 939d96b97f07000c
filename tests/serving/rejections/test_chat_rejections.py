"""Chats and completions with invalid parameters are rejected, and never reach the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from tests.serving.conftest import Server

TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
REFERRING = {
    "type": "function",
    "function": {"name": "a", "parameters": {"$ref": "#x"}},
}


def allowed(tools: list[object], mode: str = "auto") -> dict[str, object]:
    """Return a chat whose choice is restricted to these tools."""
    return {
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}},
    }


MANY = {f"x{number}": 1 for number in range(100)}
CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
CHAT_CASES: list[tuple[dict[str, Any], str]] = [  # Any: JSON
    ({"thinking_token_budget": 5},
     "thinking_token_budget is not supported: the model does not reason, or the server does not "
     "know the format (--reasoning-format)."),
    ({"thinking_token_budget": -2},
     "thinking_token_budget must be 0 or more, not -2."),
    ({"thinking_token_budget": 5, "bad_words": ["x"]},
     "bad_words cannot be combined with thinking_token_budget."),
    ({"thinking_token_budget": 0, "use_beam_search": True},
     "thinking_token_budget cannot be combined with use_beam_search."),
    ({"messages": []}, "messages must not be empty."),
    ({"messages": "hi"}, "messages must be a list, not 'hi'."),
    ({"messages": ["hi"]}, "messages.0 must be an object, not 'hi'."),
    ({"messages": [{"role": "user"}]}, "messages.0.content is required."),
    ({"messages": [{"role": "god", "content": "x"}]},
     "messages.0.role must be one of 'system', 'developer', 'user', 'assistant', 'tool' or "
     "'function', not 'god'."),
    ({"messages": [{"role": "user", "content": 5}]},
     "messages.0.content must be a string or a list of text parts."),
    ({"messages": [{"role": "user", "content": ["x", 5]}]},
     "messages.0.content must be a string or a list of text parts."),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages.0.content.0 is not supported: the model only reads text, not image_url parts."),
    ({"messages": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]},
     "messages.0.content.0.type must be one of 'text', 'input_text', 'output_text', 'refusal' or "
     "'thinking', not an object."),
    ({"messages": [{"role": "user", "content": [{"type": "txt", "text": "x"}]}]},
     "messages.0.content.0.type must be one of 'text', 'input_text', 'output_text', 'refusal' or "
     "'thinking', not 'txt'."),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]},
     "messages.0.content.0.type is required."),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
     "messages.0.content.0 of type refusal requires role = assistant."),
    ({"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]},
     "messages.0.content.0.refusal is required."),
    ({"messages": [{"role": "assistant", "content": [
        {"type": "thinking", "thinking": "x", "closed": False}]}]},
     "messages.0.content.0.closed must be true, not false."),
    ({"messages": [{"role": "assistant", "reasoning": "x", "content": [
        {"type": "thinking", "thinking": "y"}]}]},
     "messages.0.reasoning and thinking parts must be equal if both are given."),
    ({"messages": [{"role": "user", "content": "x", "refusal": "No."}]},
     "messages.0.refusal requires role = assistant."),
    ({"messages": [{"role": "assistant", "content": 0, "refusal": "No."}]},
     "messages.0.refusal cannot be combined with content."),
    ({"messages": [MANY]}, "messages.0.role is required."),
    # An object with more names than fields is not validated further.
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": MANY}},
     "tool_choice.function.x0 is not supported."),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": MANY}]}]},
     "messages.0.tool_calls.0.function.name is required."),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]},
     "messages.0.reasoning requires role = assistant."),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning": "y",
     "reasoning_content": "z"}]},
     "messages.0.reasoning and reasoning_content must be equal if both are set."),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "me"}]},
     "messages.0.tool_call_id requires role = tool."),
    ({"messages": [{"role": "user", "content": "x", "name": "x" * 129}]},
     "messages.0.name may have at most 128 characters."),
    ({"messages": [{"role": "assistant", "content": "x", "refusal": "No."}]},
     "messages.0.refusal cannot be combined with content."),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object of at most 64 "
     "entries."),
    ({"chat_template_kwargs": {"a b": 1}},
     "chat_template_kwargs must have names of variables of at most 64 characters."),
    ({"chat_template_kwargs": {"messages": []}},
     "chat_template_kwargs.messages is not supported: messages is a parameter of its own."),
    ({"chat_template_kwargs": {"a": "x" * 70_000}},
     "chat_template_kwargs may have at most 65536 bytes of JSON, not 70008."),
    *(({"reasoning_effort": value}, "reasoning_effort must be one of 'none', 'minimal', 'low', "
       f"'medium', 'high', 'xhigh', 'max', or a number from 0 to 0.99, not {shown}.")
      for value, shown in (("huge", "'huge'"), (1, "1"), (-0.5, "-0.5"), (True, "true"),
                           ({}, "an object"))),
    ({"documents": [{"text": "x"}]},
     "documents is not supported: the model's chat template does not read it."),
    ({"documents": ["x"]}, "documents must be a list of objects."),
    ({"web_search_options": {}},
     "web_search_options is not supported: the server has no access to the web."),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]},
     "The model's chat template rejected the messages: The system speaks first."),
    ({"tools": 5}, "tools must be a list."),
    ({"tools": [{"type": "function"}]}, "tools.0.function is required."),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
     "tools.0.function.name must be 1 to 128 letters, digits, underscores, dashes or dots."),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 70_000}}]},
     "tools.0.function may have at most 65536 bytes of JSON, not 70107."),
    ({"tools": [TOOL] * 2}, "tools must have unique names."),
    ({"tools": [TOOL] * 1025}, "tools may have at most 1024 entries, not 1025."),
    ({"tools": [TOOL]}, "The model's chat template has no known format of tool calls; name the "
     "function to call, or start the server with --tool-call-format."),
    ({"tools": [TOOL], "tool_choice": "some"},
     "tool_choice must be none, auto, required, a named function or allowed_tools."),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}},
     "tool_choice names 'b', which is not in tools."),
    ({"tool_choice": "required"}, "tool_choice requires tools."),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_schema"}},
     "response_format.json_schema.name is required."),
    ({"tools": [REFERRING], "tool_choice": "required"},
     "tools has the unsupported $ref '#x' in the parameters of 'a'; it must refer to a part of "
     "them, such as #/$defs/name."),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
     "tool_choice.mode is not supported."),
    (allowed([]), "tool_choice.allowed_tools.tools must be a list of 1 to 1024 tools."),
    (allowed([TOOL], mode="none"),
     "tool_choice.allowed_tools.mode must be one of 'auto' or 'required', not 'none'."),
    (allowed([{"type": "mcp", "server_label": "x"}]),
     "tool_choice.allowed_tools.tools.0.type must be 'function', not 'mcp'."),
    (allowed([{"type": "function", "function": {"name": "b"}}]),
     "tool_choice names 'b', which is not in tools."),
    (allowed([{"type": "function", "function": {"name": "a", "description": "x"}}]),
     "tool_choice and tools define 'a' differently."),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
     "messages.0.tool_calls requires role = assistant."),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a",
     "arguments": "[1]"}}]}]},
     "messages.0.tool_calls.0.function.arguments must be a JSON object as a string."),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a",
     "arguments": '{"a": [1e400]}'}}]}]},
     "messages.0.tool_calls.0.function.arguments has a number that exceeds the range of a double."),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
     "messages.0.tool_calls.0.function is required."),
    ({"response_format": {"type": "xml"}},
     "response_format.type must be one of 'text', 'json_object', 'json_schema' or "
     "'structural_tag', not 'xml'."),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name is required."),
    ({"continue_final_message": True},
     "continue_final_message requires add_generation_prompt = false."),
    ({"chat_template": "{{ x }}"}, "chat_template is not supported: the server must be started "
     "with --trust-request-chat-template."),
    ({"logprobs": 5}, "logprobs must be true or false, not 5."),
    ({"top_logprobs": 5}, "top_logprobs requires logprobs = true."),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be from 0 to 20, not 21."),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation must be false, not true."),
    ({"max_completion_tokens": 1000}, "max_completion_tokens must be from 1 to 251, not 1000: the "
     "prompt has 5 tokens and the context length is 256."),
    ({"max_completion_tokens": 0}, "max_completion_tokens must be 1 or more, not 0."),
    ({"prompt": "x"}, "prompt is not supported: did you mean messages?"),
    ({"messages": [{"role": "user", "content": "~" * 300}]},
     "messages has 304 tokens, but the context length of 256 allows at most 255 and one generated "
     "token."),
]  # fmt: skip


@pytest.mark.parametrize(("body", "text"), CHAT_CASES)
def test_chat_rejects(server: Server, body: dict[str, Any], text: str) -> None:
    good = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=good | body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, text)
    assert server.engine.log.submitted == []


HTTP_CASES: list[tuple[dict[str, Any], str, str | None]] = [  # Any: JSON
    ({"prompt": None}, "prompt is required.", "prompt"),
    ({"prompt": 5}, "prompt must be a string, a list of strings, a list of token ids or a list of "
     "such lists.", "prompt"),
    ({"prompt": [1, "a"]}, "prompt must be a string, a list of strings, a list of token ids or a "
     "list of such lists.", "prompt"),
    ({"prompt": [True]}, "prompt must be a string, a list of strings, a list of token ids or a "
     "list of such lists.", "prompt"),
    ({"prompt": [[]]}, "prompt must not be empty.", "prompt"),
    ({"prompt": [-1]}, "prompt contains token id -1, but ids are 0 to 319.", "prompt"),
    ({"prompt": ["x"] * 129}, "n = 1 for 129 prompts requests 129 sequences; at most 128 are "
     "allowed.", "prompt"),
    ({"prompt": ["x"] * 65, "n": 2}, "n = 2 for 65 prompts requests 130 sequences; at most "
     "128 are allowed.", "prompt"),
    ({"max_tokens": 0}, "max_tokens = 0 requires echo or prompt_logprobs, and stream = false.",
     "max_tokens"),
    ({"max_tokens": -2}, "max_tokens must be 1 or more, not -2.", "max_tokens"),
    ({"max_completion_tokens": 0, "max_tokens": 5},
     "max_completion_tokens = 0 requires echo or prompt_logprobs, and stream = false.",
     "max_completion_tokens"),
    ({"max_tokens": "5"}, "max_tokens must be an integer, not '5'.", "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens must be an integer, not 5.5.", "max_tokens"),
    ({"max_tokens": True}, "max_tokens must be an integer, not true.", "max_tokens"),
    ({"max_tokens": [5]}, "max_tokens must be an integer, not a list.", "max_tokens"),
    ({"max_tokens": {"a": 5}}, "max_tokens must be an integer, not an object.", "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be from 0 to 8, not 9.", "min_tokens"),
    ({"temperature": "hot"}, "temperature must be a number, not 'hot'.", "temperature"),
    ({"temperature": [1] * 9}, "temperature must be a number, not a list.",
     "temperature"),
    ({"top_k": -2}, "top_k must be -1 or more, not -2.", "top_k"),
    ({"seed": 2**64}, "seed must be from -9223372036854775808 to 9223372036854775807, not "
     "18446744073709551616.", "seed"),
    ({"priority": 2**40}, "priority must be from -2147483648 to 2147483647, not 1099511627776.",
     "priority"),
    ({"stop": 5}, "stop must be a list of strings.", "stop"),
    ({"stop": [5]}, "stop must contain strings of 1 to 512 characters.", "stop"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list of integers.", "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids.0 must be an integer, not 'a'.",
     "stop_token_ids.0"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids requires logprobs.", "logprob_token_ids"),
    ({"logprob_token_ids": [5], "n": 1, "best_of": 2}, "logprob_token_ids requires logprobs.",
     "logprob_token_ids"),
    ({"logprob_token_ids": [], "logprobs": 1}, "logprob_token_ids must not be empty.",
     "logprob_token_ids"),
    ({"logprob_token_ids": [320], "logprobs": 1},
     "logprob_token_ids contains token id 320, but ids are 0 to 319.", "logprob_token_ids"),
    ({"logprob_token_ids": [*range(21)], "logprobs": 1},
     "logprob_token_ids may have at most 20 entries, not 21.", "logprob_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids must not be empty.", "allowed_token_ids"),
    ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of integers.",
     "allowed_token_ids"),
    ({"allowed_token_ids": [5], "guided_regex": "a"},
     "allowed_token_ids cannot be combined with a structure.", "allowed_token_ids"),
    ({"bad_words": "a"}, "bad_words must be a list of strings.", "bad_words"),
    ({"bad_words": [5]},
     "bad_words must contain strings of 1 to 128 characters that are not blank.", "bad_words"),
    ({"bad_words": ["a"], "guided_regex": "a"},
     "bad_words cannot be combined with a structure.", "bad_words"),
    ({"logit_bias": [1]}, "logit_bias must be an object that maps token ids to numbers.",
     "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias maps token ids, such as \"5\", and not '05'.",
     "logit_bias"),
    ({"extra_body": {"top_k": 1}}, "extra_body is not supported: the client library sends its "
     "entries as parameters of the request.", "extra_body"),
    ({"return_hidden_states": True}, "return_hidden_states is not supported: the server does not "
     "return hidden states.", "return_hidden_states"),
    ({"logit_bias": {"a": 1}}, "logit_bias maps token ids, such as \"5\", and not 'a'.",
     "logit_bias"),
    ({"logit_bias": {"5": "a"}}, "logit_bias.5 must be a number, not 'a'.", "logit_bias.5"),
    ({"logit_bias": {"5": True}}, "logit_bias.5 must be a number, not true.", "logit_bias.5"),
    ({"stop_token_ids": [5, 6.0]}, "stop_token_ids.1 must be an integer, not 6.0.",
     "stop_token_ids.1"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids.0 must be an integer, not true.",
     "allowed_token_ids.0"),
    ({"logprob_token_ids": [None], "logprobs": 1},
     "logprob_token_ids.0 must be an integer, not null.", "logprob_token_ids.0"),
    ({"logit_bias": {"-5": 1}}, "logit_bias contains token id -5, but ids are 0 or more.",
     "logit_bias"),
    ({"top_k": 2**64}, "top_k must be from -1 to 2147483647, not 18446744073709551616.", "top_k"),
    ({"logit_bias": {"5": 10**400}},
     "logit_bias must be from -100 to 100, not a number of more than 30 digits.", "logit_bias"),
    ({"n": 10**400}, "n must be from 1 to 128, not a number of more than 30 digits.", "n"),
    ({"stream": "yes"}, "stream must be true or false, not 'yes'.", "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options requires stream = true.",
     "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x is not supported.",
     "stream_options.x"),
    ({"stream": True, "stream_options": 3}, "stream_options must be an object, not 3.",
     "stream_options"),
    ({"model": 5}, "model must be a string, not 5.", "model"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo with logprobs requires stream = false.",
     "echo"),
    ({"max_tokens": 0, "echo": True, "stream": True},
     "max_tokens = 0 requires echo or prompt_logprobs, and stream = false.", "max_tokens"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs requires stream = false.",
     "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs must be from 0 to 20, not 21.", "prompt_logprobs"),
    ({"prompt_logprobs": 0, "use_beam_search": True},
     "prompt_logprobs cannot be combined with use_beam_search.", "prompt_logprobs"),
    ({"suffix": "x"}, "suffix is not supported: the model's tokenizer has no known "
     "fill-in-the-middle tokens.", "suffix"),
    ({"best_of": 2, "n": 3}, "best_of must be from n = 3 to 128, not 2.", "best_of"),
    ({"best_of": 129}, "best_of must be from n = 1 to 128, not 129.", "best_of"),
    ({"best_of": 2, "stream": True}, "best_of above n requires stream = false.", "best_of"),
    ({"best_of": True}, "best_of must be an integer, not true.", "best_of"),
    ({"best_of": 65, "prompt": ["x", "y"]},
     "n = 65 for 2 prompts requests 130 sequences; at most 128 are allowed.", "prompt"),
    ({"temprature": 1}, "temprature is not supported: did you mean temperature?", "temprature"),
    ({"chat_template": "{{ x }}"}, "chat_template is not supported.", "chat_template"),
    ({"guided_json": 5}, "guided_json must be a JSON Schema.", "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"},
     "guided_regex and guided_json cannot be used together.",
     "guided_regex"),
    ({"structured_outputs": {}},
     "structured_outputs requires one of json, regex, choice, grammar, json_object and "
     "structural_tag.",
     "structured_outputs"),
    ({"structured_outputs": {"xml": 5}}, "structured_outputs.xml is not supported.",
     "structured_outputs.xml"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be -1, or 1 or more, not -2.",
     "truncate_prompt_tokens"),
    ({"cache_salt": "x" * 1025}, "cache_salt may have at most 1024 characters, not 1025.",
     "cache_salt"),
    ({"request_id": "x" * 129}, "request_id must have 1 to 128 printable characters.",
     "request_id"),
    ({"no such\nname": 1}, "'no such\\nname' is not supported.", None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "text", "param"), HTTP_CASES)
def test_http_rejects_what_grpc_cannot_express(
    server: Server, body: dict[str, Any], text: str, param: str | None
) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x"} | body
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (400, text, param)
    assert server.engine.log.submitted == []
