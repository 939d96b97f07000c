"""The methods of the gRPC service other than Generate and Chat."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from cluster.serving.engine_client import EngineClient
from cluster.serving.rpc.server import GrpcServer
from cluster.serving.servicer import Servicer
from pagedray.errors import EngineError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.checkpoint import TEXT
from tests.serving.conftest import engine_config
from tests.serving.grpc_frontend import status_of_call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from numpy.typing import NDArray

    from cluster.engine.embedding_job import EmbeddingRequest
    from cluster.engine.stats import EngineStats
    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server

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

    def submit_request(self, request: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        self.submitted.append(request)
        answer: Future[NDArray[np.float32]] = Future()
        if request.deadline_s is None:
            vectors = np.ones((len(request.texts), request.size), np.float32)
            vectors[:, 0] = [len(text) for text in request.texts]
            answer.set_result(vectors)
        return answer


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
async def encoder_stub(tokenizer: Tokenizer, encoder: FakeEncoder) -> AsyncIterator[Any]:
    # Any: the generated stub is not async to mypy
    client = EngineClient(asyncio.get_running_loop())
    client.attach_embedding_engine(encoder)
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
