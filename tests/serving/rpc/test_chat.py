"""Chat over gRPC: conversations, tools and their streams."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from cluster.serving.auth import ANONYMOUS
from cluster.serving.calls.generation_call import GenerationOutput, Usage
from cluster.serving.intake import LARGEST
from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.chat import Chat
from cluster.serving.text.templates.chat_prompt import ChatPrompt
from cluster.serving.text.text_stream import SequenceOutput
from pagedray.errors import InvalidRequestError
from pagedray.request import FinishReason
from pagedray.structure import Structure
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.checkpoint import TEXT

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server

Stub = pagedray_pb2_grpc.GenerationServiceStub
USER = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = pb.Tool(name="weather", description="Tells it.", parameters=json.dumps(SCHEMA))


TEMPLATE: dict[str, Any] = {  # Any: functions
    "known_variables": lambda has_tools: frozenset(),
    "note_ignored": lambda name: None,
}
REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
LARGE_TOOLS = [
    pb.Tool(name=f"tool{i}", parameters=json.dumps({"properties": {"x" * 20_000: {}}}))
    for i in range(16)
]


def _request(**fields: Any) -> pb.ChatRequest:  # Any: fields of all types
    return pb.ChatRequest(messages=[USER], **fields)


def _chat(**fields: Any) -> Chat:  # Any: fields of all types
    return Chat.from_message(_request(**fields), tool_format="hermes")


def test_turn_is_streamed_with_prompt_and_usage(stub: Stub, tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode(TEXT, add_special_tokens=False))
    sampling = pb.SamplingParams(max_tokens=num_tokens, n=2, logprobs=1)
    messages = list(stub.Chat(_request(sampling=sampling, request_id="mine")))
    texts = ["", ""]
    num_logprobs = 0
    for message in messages:
        for one in message.sequences:
            texts[one.index] += one.content
            assert len(one.logprobs) == len(one.token_ids)
            num_logprobs += len(one.logprobs)
    assert texts[0] == TEXT
    assert num_logprobs == 2 * num_tokens
    assert messages[0].prompt_info.num_prompt_tokens == messages[-1].usage.num_prompt_tokens > 0
    assert messages[-1].usage.num_generated_tokens == 2 * num_tokens
    assert {message.request_id for message in messages} == {"mine"}
    assert messages[-1].sequences[0].finish_reason == pb.FINISH_REASON_LENGTH


def test_turn_without_log_probabilities_is_streamed(stub: Stub, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    sampling = pb.SamplingParams(max_tokens=len(token_ids))
    sequences = [
        one for message in stub.Chat(_request(sampling=sampling)) for one in message.sequences
    ]
    assert "".join(one.content for one in sequences) == TEXT
    assert [token_id for one in sequences for token_id in one.token_ids] == token_ids


def test_conversation_reaches_the_prompt(stub: Stub, server: Server) -> None:
    turns = [
        pb.ChatMessage(role=pb.CHAT_ROLE_SYSTEM, content="Be brief."),
        USER,
        pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, content="Hi"),
    ]
    for is_continued, end in ((False, "</s><|assistant|>"), (True, "")):
        sampling = pb.SamplingParams(max_tokens=1, temperature=0.7, seed=5)
        list(stub.Chat(pb.ChatRequest(
            messages=turns, sampling=sampling, priority=3, continue_final_message=is_continued
        )))  # fmt: skip
        request = server.engine.log.submitted[-1]
        text = server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        assert text == f"<s><|system|>Be brief.</s><|user|>hello</s><|assistant|>Hi{end}"
        assert (request.sampling.temperature, request.seed, request.priority) == (0.7, 5, 3)


def _output(text: str, reason: FinishReason | None = None) -> GenerationOutput:
    sequence = SequenceOutput(index=0, text=text, token_ids=(5,), finish_reason=reason)
    usage = Usage(num_prompt_tokens=3, num_cached_tokens=0, num_generated_tokens=1)
    return GenerationOutput(sequences=(sequence,), usage=usage, is_last=reason is not None)


def test_named_tool_is_forced() -> None:
    chat = _chat(tools=[TOOL], tool_choice=pb.ToolChoice(tool="weather"))
    structure = chat.to_input(RpcCall(), ANONYMOUS, LARGEST, **TEMPLATE).sampling["structure"]
    assert isinstance(structure, Structure)
    assert (structure.kind, json.loads(structure.text)) == ("json_schema", SCHEMA)
    outputs = [_output('{"city": '), _output('"Oslo"}', FinishReason.STOP)]
    parts = [chat.response("id", output).sequences[0] for output in outputs]
    deltas = [delta for part in parts for delta in part.tool_calls]
    assert deltas[0].name == "weather"
    assert deltas[0].id.startswith("call_")
    assert "".join(delta.arguments for delta in deltas) == '{"city": "Oslo"}'
    assert parts[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS


def test_calls_of_strict_tools_follow_the_schema() -> None:
    strict = pb.Tool(name="look", parameters=TOOL.parameters, strict=True)
    given = _chat(tools=[TOOL, strict]).to_input(RpcCall(), ANONYMOUS, LARGEST, **TEMPLATE)
    structure = given.sampling["structure"]
    assert isinstance(structure, Structure)
    assert (structure.kind, structure.mark) == ("calls", "<tool_call>")


def test_calls_are_parsed_from_the_text_as_it_streams() -> None:
    chat = _chat(tools=[TOOL])
    text = 'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    outputs = [_output(character) for character in text] + [_output("", FinishReason.STOP)]
    answers = [chat.response("id", output) for output in outputs]
    parts = [answer.sequences[0] for answer in answers]
    assert "".join(part.content for part in parts) == "Let me see."
    deltas = [delta for part in parts for delta in part.tool_calls]
    assert [delta.name for delta in deltas if delta.name] == ["weather"]
    assert json.loads("".join(delta.arguments for delta in deltas)) == {"city": "Oslo"}
    assert parts[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert answers[0].HasField("prompt_info")
    assert answers[-1].HasField("usage")


def test_turns_of_tools_reach_the_template() -> None:
    turns = [
        USER,
        pb.ChatMessage(
            role=pb.CHAT_ROLE_ASSISTANT,
            tool_calls=[pb.ToolCall(id="a", name="weather", arguments='{"city": "Oslo"}')],
        ),
        pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, content="Rain", tool_call_id="a", name="weather"),
    ]
    message = pb.ChatRequest(messages=turns, tools=[TOOL])
    chat = Chat.from_message(message, tool_format="hermes")
    given = chat.to_input(RpcCall(), ANONYMOUS, LARGEST, **TEMPLATE)
    (prompt,) = given.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1].tool_calls[0].arguments == {"city": "Oslo"}
    assert (prompt.messages[2].tool_call_id, prompt.messages[2].name) == ("a", "weather")
    assert prompt.tools == (
        {
            "type": "function",
            "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA},
        },
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 200}, "tools"),
        ({"tools": [pb.Tool(name="a b")]}, "tools.0.name"),
        ({"tools": [pb.Tool(name="x", parameters="[1]")]}, "tools.0.parameters"),
        ({"tools": [pb.Tool(name="x", parameters="{" * 100_000)]}, "tools.0.parameters"),
        ({"tools": [pb.Tool(name="x", description="d" * 100_000)]}, "tools.0"),
        ({"tools": LARGE_TOOLS, "tool_choice": REQUIRED}, "tools"),
        ({"tools": [TOOL], "tool_choice": pb.ToolChoice()}, "tool_choice.mode"),
        ({"tools": [TOOL], "tool_choice": pb.ToolChoice(mode=9)}, "tool_choice.mode"),  # type: ignore[arg-type]  # the stubs are narrower than the library
        ({"tools": [TOOL], "tool_choice": pb.ToolChoice(tool="other")}, "tool_choice"),
        ({"tools": [TOOL],
          "sampling": pb.SamplingParams(structure=pb.Structure(grammar="root ::= []"))},
         "structure"),
    ],
)  # fmt: skip
def test_bad_tools_are_rejected(fields: dict[str, Any], param: str) -> None:
    # Any: fields of all types
    with pytest.raises(InvalidRequestError) as caught:
        _chat(**fields).to_input(RpcCall(), ANONYMOUS, LARGEST, **TEMPLATE)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.ChatRequest(), "messages must not be empty."),
        (pb.ChatRequest(messages=[pb.ChatMessage(content="x")]), "messages.0.role must be one of"),
        (pb.ChatRequest(messages=[USER] * 257),
         "messages may have at most 256 entries with a context length of 256 (--max-model-len), "
         "not 257."),
        (pb.ChatRequest(messages=[USER], tools=[TOOL]),
         "The model's chat template has no known format"),
        (pb.ChatRequest(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, tool_calls=[
            pb.ToolCall(name="x", arguments="nonsense")])]),
         "messages.0.tool_calls.0.arguments must be a JSON object as a string."),
        (pb.ChatRequest(messages=[USER], tools=[pb.Tool(name="x", parameters="[1]")]),
         "tools.0.parameters must be a JSON object."),
        (pb.ChatRequest(messages=[USER], chat_template_kwargs='{"a": 1, "a": 2}'),
         "chat_template_kwargs has an object with a duplicate name."),
        (pb.ChatRequest(messages=[USER], documents=["{}", "[1]"]),
         "documents.1 must be a JSON object."),
        (pb.ChatRequest(messages=[USER], documents=["{}"] * 1025),
         "documents may have at most 1024 entries, not 1025."),
        (pb.ChatRequest(messages=[USER], documents=["{}"]),
         "documents is not supported: the model's chat template does not read it."),
        (pb.ChatRequest(messages=[USER], chat_template="x"),
         "chat_template is not supported: the server must be started with"),
    ],
)  # fmt: skip
def test_bad_conversation_is_rejected(
    stub: Stub, server: Server, message: pb.ChatRequest, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Chat(message))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(text)
    assert server.engine.log.submitted == []


@pytest.mark.parametrize(
    ("structure", "wanted"),
    [
        (pb.Structure(json_object=True), Structure(kind="json_object")),
        (pb.Structure(json_schema='{"type": "object"}'),
         Structure(kind="json_schema", text='{"type": "object"}')),
        (pb.Structure(regex="a+"), Structure(kind="regex", text="a+")),
        (pb.Structure(grammar='root ::= "a"'), Structure(kind="grammar", text='root ::= "a"')),
        (pb.Structure(choices=pb.Choices(texts=["yes", "no"])),
         Structure(kind="choice", text='["yes", "no"]')),
        (pb.Structure(structural_tag='{"format": {"type": "any_text"}}'),
         Structure(kind="structural_tag", text='{"format": {"type": "any_text"}}')),
    ],
)  # fmt: skip
def test_structure_is_passed_to_the_engine(structure: pb.Structure, wanted: Structure) -> None:
    chat = _chat(sampling=pb.SamplingParams(structure=structure))
    given = chat.to_input(RpcCall(), ANONYMOUS, LARGEST, **TEMPLATE)
    assert given.sampling == {"structure": wanted}
