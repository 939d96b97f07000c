"""Whatever the engine's events do, a response is complete or ends with an error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, Self

import grpc
import httpx
import pytest

from cluster.serving.buffers import ReaderLimits
from cluster.serving.openai.generation_response import ResponseChunks
from cluster.serving.ray_serve.handle import ServeHandle
from cluster.serving.ray_serve.options import MessagePace
from pagedray.errors import EngineError, PagedRayError
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.conftest import Server
from tests.serving.ray_serve.failing_replicas import FailingReplicas, Replica
from tests.serving.ray_serve.proxied_clients import over_grpc, over_http

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.calls.generation_call import GenerationOutput
    from cluster.serving.engine_client import EngineClient, EngineStream
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.v1 import pagedray_pb2_grpc

Fault = Literal["ends", "is closed", "raises a defect", "raises an engine error", "is cancelled"]
FAULTS: tuple[Fault, ...] = (
    "ends",
    "is closed",
    "raises a defect",
    "raises an engine error",
    "is cancelled",
)
NUM_TOKENS = 200
CHAT: list[dict[str, str]] = [{"role": "user", "content": "hello"}]


class FaultyStream:
    """The events of a call, which stop in some way after a number of items."""

    def __init__(self, stream: EngineStream, fault: Fault, num_items: int) -> None:
        self._stream = stream
        self._fault = fault
        self._num_left = num_items

    # Any: attributes of the stream.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        if self._num_left == 0:
            match self._fault:
                case "ends":
                    raise StopAsyncIteration
                case "is closed":
                    asyncio.get_running_loop().call_later(0.01, self._stream.close)
                case "raises a defect":
                    raise KeyError("a defect")
                case "raises an engine error":
                    raise EngineError("The engine failed.")
                case "is cancelled":
                    raise asyncio.CancelledError
        self._num_left -= 1
        return await self._stream.__anext__()


def make_faulty(
    monkeypatch: pytest.MonkeyPatch, client: EngineClient, fault: Fault, num_items: int
) -> None:
    open_stream = client.open_stream
    # Any: arguments and result are passed on.
    monkeypatch.setattr(
        client,
        "open_stream",
        lambda *given, **named: FaultyStream(open_stream(*given, **named), fault, num_items),
    )


@pytest.fixture(params=[0, 3])
def num_items(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.mark.parametrize("fault", FAULTS)
def test_grpc_ends_with_an_error(
    server: Server,
    stub: pagedray_pb2_grpc.GenerationServiceStub,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    num_items: int,
) -> None:
    server.engine.step_s = 0.002
    make_faulty(monkeypatch, server.client, fault, num_items)
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    message = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hello")
    for call in (
        stub.Generate(pb.GenerateRequest(text="hello", sampling=sampling), timeout=60.0),
        stub.Chat(pb.ChatRequest(messages=[message], sampling=sampling), timeout=60.0),
    ):
        with pytest.raises(grpc.RpcError) as failed:
            list(call)
        assert failed.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_chat", [False, True])
def test_http_ends_with_an_error(
    server: Server,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    num_items: int,
    is_chat: bool,
) -> None:
    server.engine.step_s = 0.002
    make_faulty(monkeypatch, server.client, fault, num_items)
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": CHAT} if is_chat else {"prompt": "hello"}  # Any: JSON
    body = {"model": "tiny", "max_tokens": NUM_TOKENS, "ignore_eos": True, **prompt}
    text = http.post(path, json=body | {"stream": True}).text
    assert '"error":{' in text
    assert '"finish_reason":"' not in text
    assert http.post(path, json=body).status_code in (500, 503)


@pytest.mark.parametrize("is_resumable", [False, True])
def test_http_ends_with_an_error_if_an_event_cannot_be_written(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_resumable: bool
) -> None:
    events = ResponseChunks._events

    def fail(self: ResponseChunks, output: GenerationOutput) -> Iterator[bytes]:
        yield from events(self, output)
        if output.usage.num_generated_tokens > 3:
            raise KeyError("a defect")

    monkeypatch.setattr(ResponseChunks, "_events", fail)
    options = {"stream_options": {"resumable": True}} if is_resumable else {}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    limits = ReaderLimits(resume_grace_s=3600.0, resumes_anonymous=True)
    with Server(tokenizer, reader_limits=limits) as server:
        url = f"{server.url}/v1/completions"
        text = httpx.post(url, json=body | {"stream": True} | options).text
    assert "Internal server error" in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("fault", FAULTS)
async def test_ray_serve_ends_with_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, fault: Fault, num_items: int
) -> None:
    replica = Replica(server.tokenizer, server.script)
    replica.engine.step_s = 0.002
    serve = FailingReplicas([replica], may_continue=False)
    make_faulty(monkeypatch, replica.servicer.client, fault, num_items)
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    request = pb.GenerateRequest(text="hello", sampling=sampling)
    try:
        context = await over_grpc(serve, "Generate", request)
        assert context.code is not grpc.StatusCode.OK
        body = {"model": "tiny", "prompt": "hello", "stream": True, "max_tokens": NUM_TOKENS}
        received = await over_http(serve, "/v1/completions", body | {"ignore_eos": True})
        assert b'"error":{' in b"".join(one.get("body", b"") for one in received)
        handle = ServeHandle(replica.servicer, MessagePace(1e6))
        outputs = handle.generate(
            "hello",
            {"max_tokens": NUM_TOKENS, "ignore_eos": True},
            model=None,
            request_id=None,
            priority=0,
            timeout_s=None,
            key=None,
        )
        with pytest.raises(PagedRayError):
            _ = [one async for one in outputs]
    finally:
        await replica.close()


def test_silence_ends_at_the_deadline(
    server: Server, stub: pagedray_pb2_grpc.GenerationServiceStub
) -> None:
    server.engine.is_paused = True
    with pytest.raises(grpc.RpcError) as failed:
        list(stub.Generate(pb.GenerateRequest(text="hello"), timeout=0.3))
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
