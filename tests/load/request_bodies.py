"""Valid bodies of every method and endpoint that takes one, which are fast to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["json_bodies", "protobuf_bodies"]

_MODEL = "model"
_SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
_TEXT = "h\u00e9llo \u4e16"
_PLAIN = pb.SamplingParams(max_tokens=2, temperature=0.0)
_SAMPLING = pb.SamplingParams(
    max_tokens=2, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop=["zz"], n=2, seed=7,
    logit_bias={5: 1.0}, logprobs=1, min_tokens=1, stop_token_ids=[9], repetition_penalty=1.1,
    presence_penalty=0.5, frequency_penalty=-0.5, ignore_eos=True, prompt_logprobs=1,
    allowed_token_ids=[5, 6, 7, 8], bad_words=["hello", "~"], logprob_token_ids=[5, 9],
)  # fmt: skip
_USER = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=_TEXT)
_CALL = pb.ToolCall(id="c", name="look", arguments='{"a":1}')
_TURNS = (
    pb.ChatMessage(role=pb.CHAT_ROLE_SYSTEM, content="s"),
    _USER,
    pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, tool_calls=[_CALL]),
    pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, content="1", tool_call_id="c", name="look"),
)
_TOOL = pb.Tool(name="look", description="d", parameters=_SCHEMA)


def _structured(structure: pb.Structure) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="x", sampling=pb.SamplingParams(max_tokens=2, structure=structure)
    )


_BY_METHOD: dict[str, tuple[Message, ...]] = {
    "Generate": (
        pb.GenerateRequest(
            request_id="a", text=_TEXT, sampling=_SAMPLING, priority=1, timeout={"seconds": 20}
        ),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=_PLAIN),
        pb.GenerateRequest(text="def", sampling=_PLAIN, model=_MODEL),
    ),
    "Generate of a structure": (
        _structured(pb.Structure(json_schema=_SCHEMA)),
        _structured(pb.Structure(regex="[ab]+c")),
        _structured(pb.Structure(choices=pb.Choices(texts=["yes", "no"]))),
        _structured(pb.Structure(json_object=True)),
        _structured(pb.Structure(grammar='root ::= "a" | "b"')),
        _structured(pb.Structure(structural_tag='{"format": {"type": "any_text"}}')),
    ),
    "Chat": (
        pb.ChatRequest(messages=[_USER], sampling=_SAMPLING, model=_MODEL),
        pb.ChatRequest(
            messages=_TURNS,
            sampling=_PLAIN,
            tools=[_TOOL],
            tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE),
            parallel_tool_calls=False,
        ),
    ),
    "Embed": (
        pb.EmbedRequest(
            prompts=[pb.EmbedPrompt(text="x"), pb.EmbedPrompt(token_ids=pb.TokenIds(ids=[1]))],
            dimensions=3,
            pooling=pb.POOLING_MEAN,
            normalize=False,
        ),
    ),
    "Score": (pb.ScoreRequest(query="x", documents=["y", "z"], instruction="i"),),
    "Tokenize": (
        pb.TokenizeRequest(text=_TEXT, add_special_tokens=False),
        pb.TokenizeRequest(conversation=pb.Conversation(messages=_TURNS, tools=[_TOOL])),
    ),
    "Detokenize": (pb.DetokenizeRequest(token_ids=[5, 6, 7], skip_special_tokens=True),),
    "Abort": (pb.AbortRequest(request_ids=["a", "b"]),),
    "ListModels": (pb.ListModelsRequest(),),
    "GetServerInfo": (pb.GetServerInfoRequest(),),
    "GetLoads": (pb.GetLoadsRequest(),),
}

_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL_OBJECT = {
    "type": "function",
    "function": {"name": "look", "description": "d", "parameters": _PARAMETERS},
}
_COMMON: dict[str, Any] = {  # Any: JSON
    "model": _MODEL, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
    "min_p": 0.1, "seed": 7, "n": 2, "stop": ["zz", "y"], "logit_bias": {"5": 1.0},
    "stop_token_ids": [9], "min_tokens": 1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "ignore_eos": True, "user": "u", "priority": 1,
}  # fmt: skip
_MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": _TEXT}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
_LEGACY_MESSAGES = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "function_call": {"name": "look", "arguments": '{"a":1}'}},
    {"role": "function", "name": "look", "content": "1"},
]
_ITEMS = [
    {"role": "developer", "content": "s"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _TEXT}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a":1}'},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
]
_ITEM_TOOL = {"type": "function", "name": "look", "description": "d", "parameters": _PARAMETERS}
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": _TEXT}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "h", "signature": "s"},
            {"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
]
_BLOCK_TOOL = {"name": "look", "description": "d", "input_schema": _PARAMETERS}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_SHORT = {"model": _MODEL, "max_tokens": 2}
_CHAT = {**_SHORT, "messages": [{"role": "user", "content": "x"}]}

_BY_PATH: dict[str, tuple[dict[str, Any], ...]] = {  # Any: JSON
    "/v1/completions": (
        {**_COMMON, "prompt": _TEXT, "logprobs": 1, "logprob_token_ids": [5, 9]},
        {**_COMMON, **_STREAM, "prompt": ["a", "b"]},
        {**_SHORT, "prompt": [[5, 6], [7]], "echo": False},
    ),
    "/v1/completions with a structure": (
        {**_SHORT, "prompt": "x", "guided_regex": "[ab]+c"},
        {**_SHORT, "prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}},
        {**_SHORT, "prompt": "x", "guided_grammar": 'root ::= "a" | "b"'},
        {
            **_SHORT,
            "prompt": "x",
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
                "triggers": ["<a"],
            },
        },
    ),
    "/v1/chat/completions": (
        {**_COMMON, "messages": _MESSAGES, "logprobs": True, "top_logprobs": 2},
        {
            **_SHORT,
            "messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}],
            "truncate_prompt_tokens": 3,
            "truncation_side": "right",
            "thinking_token_budget": -1,
        },
        {
            **_SHORT,
            **_STREAM,
            "messages": _MESSAGES,
            "tools": [_TOOL_OBJECT],
            "tool_choice": "none",
        },
        {
            **_SHORT,
            **_STREAM,
            "messages": _LEGACY_MESSAGES,
            "functions": [_TOOL_OBJECT["function"]],
            "function_call": "none",
        },
    ),
    "/v1/chat/completions with a structure": (
        {
            **_CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": _PARAMETERS},
            },
        },
        {**_CHAT, "tools": [_TOOL_OBJECT], "tool_choice": "required"},
        {
            **_CHAT,
            "functions": [_TOOL_OBJECT["function"]],
            "function_call": {"name": "look"},
        },
    ),
    "/v1/responses": (
        {
            "model": _MODEL,
            "max_output_tokens": 2,
            "instructions": "s",
            "input": _ITEMS,
            "temperature": 0.5,
            "top_p": 0.9,
            "tools": [_ITEM_TOOL],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
            "store": True,
            "metadata": {"a": "b"},
            "include": ["reasoning.encrypted_content"],
        },
        {
            "model": _MODEL,
            "max_output_tokens": 2,
            "input": _TEXT,
            "stream": True,
            "logit_bias": {"5": 1.0},
            "stop": ["zz"],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        },
        {"model": _MODEL, "max_output_tokens": 2, "input": "x", "previous_response_id": "resp_1"},
    ),
    "/v1/responses/input_tokens": (
        {
            "model": _MODEL,
            "instructions": "s",
            "input": _ITEMS,
            "tools": [_ITEM_TOOL],
            "tool_choice": "none",
            "text": {"format": {"type": "text"}},
        },
        {"input": _TEXT, "truncation": "disabled"},
    ),
    "/v1/messages": (
        {
            "model": _MODEL,
            "max_tokens": 2,
            "system": "s",
            "messages": _BLOCKS,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "stop_sequences": ["zz"],
            "tools": [_BLOCK_TOOL],
            "tool_choice": {"type": "none"},
            "metadata": {"user_id": "u"},
        },
        {**_SHORT, "messages": [{"role": "user", "content": _TEXT}], "stream": True},
    ),
    "/v1/messages/count_tokens": (
        {"model": _MODEL, "system": "s", "messages": _BLOCKS, "tools": [_BLOCK_TOOL]},
    ),
    "/v1/embeddings": (
        {"model": _MODEL, "input": ["x", "y"], "dimensions": 3, "encoding_format": "float"},
    ),
    "/rerank": (
        {"model": _MODEL, "query": "x", "documents": ["a", {"text": "b"}], "top_n": 1},
        {"model": _MODEL, "query": "x", "documents": ["a"], "return_documents": False},
    ),
    "/score": ({"model": _MODEL, "text_1": "x", "text_2": ["a", "b"]},),
    "/tokenize": (
        {"model": _MODEL, "prompt": _TEXT, "add_special_tokens": False, "return_token_strs": True},
        {"messages": _MESSAGES, "tools": [_TOOL_OBJECT], "add_generation_prompt": True},
    ),
    "/detokenize": ({"model": _MODEL, "tokens": [5, 6, 7]},),
}


def protobuf_bodies(model: str) -> dict[str, list[bytes]]:
    """Return messages by method, which may be followed by a space and a variant."""
    return {
        kind: [_named(message, model).SerializeToString() for message in messages]
        for kind, messages in _BY_METHOD.items()
    }


def json_bodies(model: str) -> dict[str, list[dict[str, Any]]]:  # Any: JSON
    """Return bodies by path, which may be followed by a space and a variant."""
    return {
        kind: [body | {"model": model} if "model" in body else body for body in bodies]
        for kind, bodies in _BY_PATH.items()
    }


def _named(message: Message, model: str) -> Message:
    named = type(message)()
    named.CopyFrom(message)
    if isinstance(named, pb.GenerateRequest | pb.ChatRequest) and named.model:
        named.model = model
    return named
