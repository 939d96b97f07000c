"""The methods of the gRPC service, and the fields of prompts."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from cluster.serving.auth import ANONYMOUS
from cluster.serving.engine_client import EngineClient
from cluster.serving.generation_call import GenerationOutput, Usage
from cluster.serving.intake import LARGEST
from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.chat import Chat
from cluster.serving.rpc.server import GrpcServer
from cluster.serving.servicer import Servicer
from cluster.serving.text.template_arguments import ChatPrompt
from cluster.serving.text.text_stream import SequenceOutput
from pagedray.errors import EngineError, InvalidRequestError
from pagedray.request import FinishReason
from pagedray.sampling_params import Structure
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import TEXT, engine_config
from tests.serving.grpc_frontend import status_of_call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from numpy.typing import NDArray

    from cluster.engine.embedding_scheduler import EmbeddingRequest
    from cluster.engine.stats import EngineStats
    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

Stub = pagedray_pb2_grpc.GenerationServiceStub
CONVERSATION = pb.Conversation(
    messages=[
        pb.ChatMessage(role=pb.CHAT_ROLE_SYSTEM, content="Be brief."),
        pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello"),
    ]
)


def test_detokenize_inverts_tokenize(stub: Stub) -> None:
    ids = stub.Tokenize(pb.TokenizeRequest(text=TEXT)).token_ids
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == TEXT
    with_special = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
    assert stub.Detokenize(with_special).text == f"<s>{TEXT}"
    assert stub.Detokenize(pb.DetokenizeRequest()).text == ""


def test_conversation_is_tokenized_as_chat_reads_it(stub: Stub, server: Server) -> None:
    ids = stub.Tokenize(pb.TokenizeRequest(conversation=CONVERSATION)).token_ids
    chat = pb.ChatRequest(messages=CONVERSATION.messages, sampling=pb.SamplingParams(max_tokens=1))
    list(stub.Chat(chat))
    assert server.engine.log.submitted[0].prompt_token_ids == tuple(ids)
    assert server.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<s><|system|>Be brief.</s><|user|>hello</s><|assistant|>"
    )


def test_final_message_may_be_continued(stub: Stub, server: Server) -> None:
    conversation = pb.Conversation(messages=CONVERSATION.messages, continue_final_message=True)
    ids = stub.Tokenize(pb.TokenizeRequest(conversation=conversation)).token_ids
    text = server.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<s><|system|>Be brief.</s><|user|>hello"


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("Detokenize", pb.DetokenizeRequest(token_ids=[320]), "token_ids"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5] * 300), "token_ids"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5] * 300_000), "token_ids"),
        ("Abort", pb.AbortRequest(request_ids=["x"] * 1025), "request_ids"),
        ("Tokenize", pb.TokenizeRequest(text="x" * 1_000_000), "text"),
        ("Tokenize", pb.TokenizeRequest(), "prompt"),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation()), "messages"),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation(
            messages=[pb.ChatMessage(content="x")])), "messages.0.role"),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation(
            messages=CONVERSATION.messages, tools=[pb.Tool(name="a b")])), "tools.0.name"),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation(
            messages=CONVERSATION.messages, tools=[pb.Tool(name="a")] * 2)), "tools"),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation(
            messages=[CONVERSATION.messages[1]] * 5000)), "messages"),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation(
            messages=CONVERSATION.messages, chat_template="x")), "chat_template"),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation(
            messages=CONVERSATION.messages, chat_template_kwargs="5")), "chat_template_kwargs"),
        ("Tokenize", pb.TokenizeRequest(conversation=pb.Conversation(
            messages=CONVERSATION.messages, documents=["{}"])), "documents"),
        ("Abort", pb.AbortRequest(request_ids=[""] * 500_000), "request_ids"),
        ("Embed", pb.EmbedRequest(prompts=[pb.EmbedPrompt(text="x")]), "model"),
        ("Embed", pb.EmbedRequest(prompts=[pb.EmbedPrompt()] * 500_000), "prompts"),
    ],
)  # fmt: skip
def test_bad_message_is_rejected_quickly(stub: Stub, method: str, message: Any, field: str) -> None:
    # Any: a message of each method
    started_s = time.process_time()
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = status_of_call(caught.value)
    assert field.encode() in status.details[0].value
    # Another name in the text would be that of another frontend.
    assert method != "Detokenize" or status.message.startswith(f"{field} ")
    assert time.process_time() - started_s < 15


def test_abort_of_many_unknown_ids_is_no_error(stub: Stub) -> None:
    ids = [f"id-{number}" for number in range(1024)]
    for _ in range(2):
        assert stub.Abort(pb.AbortRequest(request_ids=ids)) == pb.AbortResponse()


async def test_loads_list_running_calls(server: Server) -> None:
    server.engine.is_paused = True
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        stub: Any = Stub(channel)  # Any: the generated stub is not async to mypy
        call = stub.Generate(pb.GenerateRequest(text="hello", request_id="mine"))
        reading = asyncio.ensure_future(call.read())
        while server.engine.num_sequences == 0:
            await asyncio.sleep(0.002)
        loads = await stub.GetLoads(pb.GetLoadsRequest())
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert (loads.is_ready, loads.num_running, loads.num_blocks) == (True, 1, 64)
    assert loads.uptime_s > 0
    (running,) = loads.calls
    assert running.request_id == "mine"
    assert running.num_prompt_tokens == len(server.tokenizer.encode("hello"))


class FakeEncoder:
    """Returns the number of tokens of a text, followed by ones."""

    is_healthy = True

    def __init__(self) -> None:
        self.submitted: list[EmbeddingRequest] = []

    def check_room(self, tenant: str, num_tokens: int) -> None:
        pass

    def stats(self) -> EngineStats:
        raise EngineError("It counts nothing.")

    @property
    def error(self) -> None:
        return None

    def submit_texts(self, texts: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        self.submitted.append(texts)
        answer: Future[NDArray[np.float32]] = Future()
        if texts.deadline_s is None:
            vectors = np.ones((len(texts.texts), texts.size), np.float32)
            vectors[:, 0] = [len(each) for each in texts.texts]
            answer.set_result(vectors)
        return answer


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
async def encoder_stub(tokenizer: Tokenizer, encoder: FakeEncoder) -> AsyncIterator[Any]:
    # Any: the generated stub is not async to mypy
    client = EngineClient(asyncio.get_running_loop())
    client.attach_engine(encoder)  # type: ignore[arg-type]  # a part of it
    config = engine_config()
    config = replace(config, model=replace(config.model, task="embed"))
    servicer = Servicer(client, tokenizer, config)
    server = GrpcServer(servicer, host="127.0.0.1", port=0)
    await server.start_server()
    servicer.set_ready()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Stub(channel)
    await server.stop_server(0)
    await servicer.close()


async def test_texts_are_embedded(encoder_stub: Any, encoder: FakeEncoder) -> None:
    message = pb.EmbedRequest(
        prompts=[pb.EmbedPrompt(text="hello"), pb.EmbedPrompt(token_ids=pb.TokenIds(ids=[5, 6]))],
        pooling=pb.POOLING_CLS,
        normalize=False,
        dimensions=3,
    )
    answer = await encoder_stub.Embed(message)
    (request,) = encoder.submitted
    assert (request.pooling, request.is_normalized, request.size) == ("cls", False, 3)
    assert request.texts[1] == (5, 6)
    assert [list(one.values) for one in answer.embeddings] == [
        [float(len(request.texts[0])), 1, 1], [2, 1, 1]
    ]  # fmt: skip
    assert answer.num_prompt_tokens == request.num_tokens


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        (pb.TRUNCATION_SIDE_UNSPECIFIED, (5, 6)),
        (pb.TRUNCATION_SIDE_RIGHT, (5, 6)),
        (pb.TRUNCATION_SIDE_LEFT, (6, 7)),
    ],
)
async def test_embedded_token_ids_are_truncated(
    encoder_stub: Any, encoder: FakeEncoder, side: pb.TruncationSide, kept: tuple[int, ...]
) -> None:
    prompt = pb.EmbedPrompt(token_ids=pb.TokenIds(ids=[5, 6, 7]))
    message = pb.EmbedRequest(prompts=[prompt], truncate_prompt_tokens=2, truncation_side=side)
    await encoder_stub.Embed(message)
    assert encoder.submitted[0].texts == (kept,)


async def test_defaults_of_embed_are_the_models(encoder_stub: Any, encoder: FakeEncoder) -> None:
    answer = await encoder_stub.Embed(pb.EmbedRequest(prompts=[pb.EmbedPrompt(text="x")]))
    assert len(answer.embeddings[0].values) == 8
    assert (encoder.submitted[0].pooling, encoder.submitted[0].is_normalized) == ("last", True)
    (model,) = (await encoder_stub.ListModels(pb.ListModelsRequest())).models
    assert model.is_encoder


async def test_timeout_of_embed_ends_the_wait(encoder_stub: Any) -> None:
    message = pb.EmbedRequest(prompts=[pb.EmbedPrompt(text="x")], timeout={"nanos": 50_000_000})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await encoder_stub.Embed(message)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert status_of_call(caught.value).message.startswith("The deadline passed")


async def test_encoder_does_not_generate(encoder_stub: Any) -> None:
    for call in (
        encoder_stub.Generate(pb.GenerateRequest(text="x")),
        encoder_stub.Chat(pb.ChatRequest(messages=CONVERSATION.messages)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "only computes embeddings" in str(caught.value.details())


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


LEFT, RIGHT = pb.TRUNCATION_SIDE_LEFT, pb.TRUNCATION_SIDE_RIGHT
ONE = pb.SamplingParams(max_tokens=2)


def prompt_of(
    engine: FakeEngine, stub: Stub, message: pb.GenerateRequest | pb.ChatRequest
) -> tuple[int, ...]:
    """Return the prompt that the engine gets."""
    engine.reset()
    list(stub.Chat(message) if isinstance(message, pb.ChatRequest) else stub.Generate(message))
    (request,) = engine.log.submitted
    return tuple(request.prompt_token_ids)


def test_special_tokens_may_be_left_out(stub: Stub, engine: FakeEngine) -> None:
    whole = prompt_of(engine, stub, pb.GenerateRequest(text="hello", sampling=ONE))
    given = pb.GenerateRequest(text="hello", sampling=ONE, add_special_tokens=False)
    assert prompt_of(engine, stub, given) == whole[1:]


@pytest.mark.parametrize(("num_kept", "length"), [(5, 5), (-1, 256 - 2)])
def test_prompts_are_truncated_at_either_side(
    stub: Stub, engine: FakeEngine, num_kept: int, length: int
) -> None:
    ids = pb.TokenIds(ids=range(290))
    given = pb.GenerateRequest(token_ids=ids, sampling=ONE, truncate_prompt_tokens=num_kept)
    assert prompt_of(engine, stub, given) == tuple(range(290 - length, 290))
    given.truncation_side = LEFT
    assert prompt_of(engine, stub, given) == tuple(range(290 - length, 290))
    given.truncation_side = RIGHT
    assert prompt_of(engine, stub, given) == tuple(range(length))


def test_conversations_are_truncated_at_either_side(stub: Stub, engine: FakeEngine) -> None:
    messages = [pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello")]
    given = pb.ChatRequest(messages=messages, sampling=ONE)
    whole = prompt_of(engine, stub, given)
    given.truncate_prompt_tokens = 3
    assert prompt_of(engine, stub, given) == whole[-3:]
    given.truncation_side = RIGHT
    assert prompt_of(engine, stub, given) == whole[:3]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens must be -1, or 1 or more, not 0.",
        ),
        ({"truncation_side": 3}, "truncation_side has unknown enum value 3."),
        (
            {"truncate_prompt_tokens": 5, "suffix": "x"},
            "suffix cannot be combined with truncate_prompt_tokens.",
        ),
    ],
)
def test_invalid_fields_are_rejected(
    stub: Stub,
    fields: dict[str, Any],  # Any: of all types
    text: str,
) -> None:
    with pytest.raises(grpc.RpcError) as rejected:
        list(stub.Generate(pb.GenerateRequest(text="hello", **fields)))
    assert (rejected.value.code(), rejected.value.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        text,
    )
