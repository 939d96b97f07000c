"""Invalid requests get the same error over every frontend and never reach the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from cluster.serving.inputs import GenerationInput
from cluster.serving.validation.validator import Validator
from pagedray.errors import InvalidRequestError
from pagedray.request import SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.conftest import engine_config

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.v1 import pagedray_pb2_grpc
    from tests.serving.conftest import Server

NAN = float("nan")
TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Case:
    """A request that both frontends can write, and the rejection."""

    text: str
    param: str
    prompt: str | list[int] = "hello"
    client_id: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)  # Any: fields of all types
    code: str | None = None

    def grpc_message(self) -> pb.GenerateRequest:
        """Return the request for gRPC."""
        message = pb.GenerateRequest(
            request_id=self.client_id, sampling=pb.SamplingParams(**self.sampling)
        )
        if isinstance(self.prompt, str):
            message.text = self.prompt
        else:
            message.token_ids.ids.extend(self.prompt)
            message.token_ids.SetInParent()
        return message


CASES = {
    "empty prompt": Case("prompt must not be empty.", "prompt", prompt=""),
    "no token ids": Case("prompt must not be empty.", "prompt", prompt=[]),
    "long prompt": Case(
        "prompt has 256 tokens, but the context length of 256 allows at most 255 and one generated "
        "token.",
        "prompt",
        prompt=[5] * 256,
        code=TOO_LONG,
    ),
    "long text": Case(
        "prompt has 301 tokens, but the context length of 256 allows at most 255 and one generated "
        "token.",
        "prompt",
        prompt="~" * 300,
        code=TOO_LONG,
    ),
    "huge text": Case(
        "prompt has 1000000 characters, but the context of 256 tokens holds at most 3328.",
        "prompt",
        prompt="x" * 1_000_000,
        code=TOO_LONG,
    ),
    "huge token list": Case(
        "prompt has 8000 tokens, but the context length of 256 allows at most 255 and one "
        "generated token.",
        "prompt",
        prompt=[5] * 8000,
        code=TOO_LONG,
    ),
    "unknown token": Case(
        "prompt contains token id 320, but ids are 0 to 319.", "prompt", prompt=[5, 320]
    ),
    "max_tokens too large": Case(
        "max_tokens must be from 1 to 253, not 254: the prompt has 3 tokens and the "
        "context length is 256.",
        "max_tokens",
        prompt=[5, 6, 7],
        sampling={"max_tokens": 254},
        code=TOO_LONG,
    ),
    "temperature": Case(
        "temperature must be 0 to 100, not -0.1.", "temperature", sampling={"temperature": -0.1}
    ),
    "top_p": Case("top_p must be 0 to 1, not 1.01.", "top_p", sampling={"top_p": 1.01}),
    "min_p": Case("min_p must be 0 to 1, not 2.", "min_p", sampling={"min_p": 2.0}),
    "repetition_penalty": Case(
        "repetition_penalty must be 0.01 to 100, not 0.",
        "repetition_penalty",
        sampling={"repetition_penalty": 0.0},
    ),
    "presence_penalty": Case(
        "presence_penalty must be -2 to 2, not 2.5.",
        "presence_penalty",
        sampling={"presence_penalty": 2.5},
    ),
    "frequency_penalty": Case(
        "frequency_penalty must be -2 to 2, not -3.",
        "frequency_penalty",
        sampling={"frequency_penalty": -3.0},
    ),
    "n 0": Case("n must be from 1 to 128, not 0.", "n", sampling={"n": 0}),
    "n 1000": Case("n must be from 1 to 128, not 1000.", "n", sampling={"n": 1000}),
    "n of 10^9": Case(
        "n must be from 1 to 128, not 1000000000.", "n", sampling={"n": 1_000_000_000}
    ),
    "logprobs": Case(
        "logprobs must be from 0 to 20, not 21.", "logprobs", sampling={"logprobs": 21}
    ),
    "empty stop": Case(
        "stop must contain strings of 1 to 512 characters.", "stop", sampling={"stop": [""]}
    ),
    "long stop": Case(
        "stop must contain strings of 1 to 512 characters.", "stop", sampling={"stop": ["x" * 513]}
    ),
    "many stops": Case(
        "stop may have at most 16 entries, not 17.", "stop", sampling={"stop": ["x"] * 17}
    ),
    "unknown stop token": Case(
        "stop_token_ids contains token id 999, but ids are 0 to 319.",
        "stop_token_ids",
        sampling={"stop_token_ids": [999]},
    ),
    "many stop tokens": Case(
        "stop_token_ids may have at most 1024 entries, not 8000.",
        "stop_token_ids",
        sampling={"stop_token_ids": [5] * 8000},
    ),
    "unknown biased token": Case(
        "logit_bias contains token id 320, but ids are 0 to 319.",
        "logit_bias",
        sampling={"logit_bias": {320: 1.0}},
    ),
    "large bias": Case(
        "logit_bias must be -100 to 100, not 101.",
        "logit_bias",
        sampling={"logit_bias": {5: 101.0}},
    ),
    "many biases": Case(
        "logit_bias may have at most 1024 entries, not 1025.",
        "logit_bias",
        sampling={"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ),
    "allowed token beyond the vocabulary": Case(
        "allowed_token_ids contains token id 320, but ids are 0 to 319.",
        "allowed_token_ids",
        sampling={"allowed_token_ids": [5, 320]},
    ),
    "too many allowed tokens": Case(
        "allowed_token_ids may have at most 4096 entries, not 4097.",
        "allowed_token_ids",
        sampling={"allowed_token_ids": [5] * 4097},
    ),
    "no token is allowed": Case(
        "allowed_token_ids must contain a token that does not end the output if min_tokens is set.",
        "allowed_token_ids",
        sampling={"allowed_token_ids": [1, 7], "stop_token_ids": [7], "min_tokens": 2},
    ),
    "bad word of spaces": Case(
        "bad_words must contain strings of 1 to 128 characters that are not blank.",
        "bad_words",
        sampling={"bad_words": ["a", " "]},
    ),
    "long bad word": Case(
        "bad_words must contain strings of 1 to 128 characters that are not blank.",
        "bad_words",
        sampling={"bad_words": ["a" * 129]},
    ),
    "bad word of many tokens": Case(
        "bad_words must contain strings of 1 to 32 tokens, but '~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~' "
        "has 33.",
        "bad_words",
        sampling={"bad_words": ["~" * 33]},
    ),
    "too many bad words": Case(
        "bad_words may have at most 256 entries, not 257.",
        "bad_words",
        sampling={"bad_words": ["a"] * 257},
    ),
    "all allowed tokens end bad words": Case(
        "allowed_token_ids must contain a token that does not end one of bad_words.",
        "allowed_token_ids",
        # Of the test's tokenizer: "!" and "#".
        sampling={"allowed_token_ids": [5, 7], "bad_words": ["!", "~#"]},
    ),
    "long id": Case(
        "request_id must have 1 to 128 printable characters.", "request_id", client_id="x" * 129
    ),
}


def _grpc_text(stub: pagedray_pb2_grpc.GenerationServiceStub, case: Case) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(case.grpc_message()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def _http_error(server: Server, case: Case, *, stream: bool) -> dict[str, Any]:  # Any: JSON
    sampling = dict(case.sampling)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(name): one for name, one in sampling["logit_bias"].items()}
    body = {"model": "tiny", "prompt": case.prompt, "stream": stream, **sampling}
    headers = {"x-request-id": case.client_id} if case.client_id else {}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    error: dict[str, Any] = answer.json()["error"]  # Any: JSON
    return error


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_frontend_rejects_with_the_same_message(
    server: Server, stub: pagedray_pb2_grpc.GenerationServiceStub, case: Case
) -> None:
    assert _grpc_text(stub, case) == case.text
    for stream in (False, True):
        assert _http_error(server, case, stream=stream) == {
            "message": case.text,
            "type": "invalid_request_error",
            "param": case.param,
            "code": case.code,
        }
    assert server.engine.log.submitted == []


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
def test_nan_and_infinity_are_rejected_over_grpc(
    server: Server, stub: pagedray_pb2_grpc.GenerationServiceStub, name: str, value: float
) -> None:
    text = _grpc_text(stub, Case("", name, sampling={name: value}))
    assert text.startswith(f"{name} must be")
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
    ({"max_tokens": -1}, "max_tokens must be 1 or more, not -1.", "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens must be an integer, not '5'.", "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens must be an integer, not 5.5.", "max_tokens"),
    ({"max_tokens": True}, "max_tokens must be an integer, not true.", "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens must be an integer, not 5.0.", "max_tokens"),
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
    ({"stop_token_ids": ["a"]}, "stop_token_ids must be an integer, not 'a'.", "stop_token_ids"),
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
    ({"logit_bias": {"5": "a"}}, "logit_bias must be a number, not 'a'.", "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias contains token id -5, but ids are 0 or more.",
     "logit_bias"),
    ({"top_k": 2**64}, "top_k must be from -1 to 2147483647, not 18446744073709551616.", "top_k"),
    ({"logit_bias": {"5": 10**400}},
     "logit_bias must be -100 to 100, not a number of more than 30 digits.", "logit_bias"),
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
    ({"cache_salt": "x" * 257}, "cache_salt may have at most 256 characters, not 257.",
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
     "messages.0.content.0 is not supported: image_url parts need a model that reads more than "
     "text."),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "name": "y"}]}]},
     "messages.0.content.0.name is not supported."),
    ({"messages": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]},
     "messages.0.content.0.type must be 'text', not an object."),
    # An object with more names than fields is not validated further.
    ({"messages": [MANY]}, "messages.0.x0 is not supported."),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": MANY}},
     "tool_choice.function.x0 is not supported."),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": MANY}]}]},
     "messages.0.tool_calls.0.function.x0 is not supported."),
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
     "messages.0.refusal is not supported: send it as content."),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object of at most 64 "
     "entries."),
    ({"chat_template_kwargs": {"a b": 1}},
     "chat_template_kwargs must have names of variables of at most 64 characters."),
    ({"chat_template_kwargs": {"messages": []}},
     "chat_template_kwargs.messages is not supported: messages is a parameter of its own."),
    ({"chat_template_kwargs": {"a": "x" * 70_000}},
     "chat_template_kwargs may have at most 65536 bytes of JSON, not 70008."),
    ({"reasoning_effort": "huge"}, "reasoning_effort must be one of 'none', 'minimal', 'low', "
     "'medium', 'high', 'xhigh' or 'max', not 'huge'."),
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
     "tools.0.function.name must be 1 to 64 letters, digits, underscores, dashes or dots."),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 70_000}}]},
     "tools.0.function may have at most 65536 bytes of JSON, not 70107."),
    ({"tools": [TOOL] * 2}, "tools must have unique names."),
    ({"tools": [TOOL] * 129}, "tools may have at most 128 entries, not 129."),
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
    (allowed([]), "tool_choice.allowed_tools.tools must be a list of 1 to 128 tools."),
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
    ({"max_tokens": 5, "max_completion_tokens": 6},
     "max_tokens and max_completion_tokens must be equal if both are set."),
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


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny","prompt":[' + b"5," * 500_000 + b"5]}",
        b'{"model":"tiny","prompt":["a",' + b"5," * 500_000 + b"5]}",
        b'{"model":"tiny","prompt":"x","stop":[' + b"5," * 500_000 + b"5]}",
        b'{"model":"tiny","prompt":"x","logit_bias":{'
        + b",".join(b'"%d":"a"' % number for number in range(90_000))
        + b"}}",
        b'{"model":"tiny","messages":[' + b"5," * 500_000 + b"5]}",
        b'{"model":"tiny","messages":[{' + b'"a":1,' * 200_000 + b'"b":1}]}',
    ],
    ids=["tokens", "mixed", "stop", "bias", "messages", "fields"],
)
def test_large_bodies_are_rejected_quickly(server: Server, body: bytes) -> None:
    path = "chat/completions" if b"messages" in body else "completions"
    headers = {"content-type": "application/json"}
    started_s = time.process_time()
    answer = httpx.post(f"{server.url}/v1/{path}", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert len(answer.content) < 500
    assert time.process_time() - started_s < 15
    assert server.engine.log.submitted == []


@pytest.mark.parametrize("client_id", ["", "x" * 129, "a\nb", "a\x00", "\u200b"])
async def test_ids_are_short_and_printable(tokenizer: Tokenizer, client_id: str) -> None:
    validator = Validator(engine_config(), tokenizer)
    with pytest.raises(InvalidRequestError, match="1 to 128 printable"):
        await validator.validate(GenerationInput(prompts=("x",), client_id=client_id))


@pytest.mark.parametrize("given", ["a\ud800", "\udfffb"])
async def test_lone_surrogates_are_rejected(tokenizer: Tokenizer, given: str) -> None:
    validator = Validator(engine_config(), tokenizer)
    for one in (
        GenerationInput(prompts=(given,)),
        GenerationInput(prompts=("x",), sampling={"stop": (given,)}),
    ):
        with pytest.raises(InvalidRequestError, match="lone surrogate"):
            await validator.validate(one)


async def test_bounds_are_inclusive(tokenizer: Tokenizer) -> None:
    validator = Validator(engine_config(), tokenizer)
    (request,) = await validator.validate(
        GenerationInput(
            prompts=((319,) * 255,),
            client_id="x" * 128,
            priority=-(2**31),
            sampling={
                "n": 128,
                "max_tokens": 1,
                "logprobs": 20,
                "stop": ("x" * 512,) * 16,
                "logit_bias": dict.fromkeys(range(320), 100.0),
                "seed": 2**63 - 1,
            },
        )
    )
    assert isinstance(request.sampling, SamplingParams)
    assert len(request.id) == 32
    assert request.seed == 2**63 - 1
