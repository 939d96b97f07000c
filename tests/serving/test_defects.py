"""Defects in serving or in the engine end the calls that meet them, and no others."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Self

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import RetryInfo

from cluster.serving.engine_client import EngineStream
from cluster.serving.intake import ReaderLimits
from cluster.serving.openai.generation_response import ResponseChunks
from cluster.serving.ray_serve.handle import ServeHandle
from cluster.serving.ray_serve.options import MessagePace
from cluster.serving.text.text_stream import TextStream
from cluster.serving.text.tokenizer import Tokenizer
from cluster.serving.validator import Validator
from pagedray.errors import CheckpointError, EngineError, PagedRayError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.serving.conftest import VOCAB_SIZE, Server
from tests.serving.grpc_frontend import status_of_call
from tests.serving.ray_serve.failing_replicas import FailingReplicas, Replica
from tests.serving.ray_serve.proxied_clients import over_grpc, over_http

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.serving.engine_client import EngineClient
    from cluster.serving.generation_call import GenerationOutput
    from pagedray.request import Request
    from tests.serving.fake_engine import FakeEngine

MARK = "~~~~"
MARKED_TOKEN = VOCAB_SIZE - 1
"""The engine generates it for the marked prompt only."""
NUM_CALLS = 8
MARKED = 5


class MarkingServer(Server):
    """Frontends whose engine generates the marked token for the marked prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.marked_ids = tuple(tokenizer.encode(MARK))

    def script(self, request: Request, index: int) -> list[int]:
        token_ids = super().script(request, index)
        is_marked = request.prompt_token_ids == self.marked_ids
        return [token_ids[0], MARKED_TOKEN, *token_ids[1:]] if is_marked else token_ids


@pytest.fixture(scope="module")
def marking_server(tokenizer: Tokenizer) -> Iterator[MarkingServer]:
    with MarkingServer(tokenizer) as server:
        yield server


def has_mark(argument: object) -> bool:
    """Whether a method was called for the marked call."""
    match argument:
        case str():
            return argument == MARK
        case list():
            return any(map(has_mark, argument))
        case _:
            return MARKED_TOKEN in getattr(argument, "token_ids", ())


STAGES: dict[str, tuple[type, str]] = {
    "validate": (Validator, "_request"),
    "tokenize": (Tokenizer, "encode"),
    "deliver": (EngineStream, "put_event"),
    "detokenize": (TextStream, "add_events"),
}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("stage", STAGES)
def test_others_get_their_text(
    marking_server: MarkingServer, monkeypatch: pytest.MonkeyPatch, stage: str, protocol: str
) -> None:
    owner, name = STAGES[stage]
    method = getattr(owner, name)

    # Any: the methods of all stages.
    def call(self: object, *arguments: Any, **more: Any) -> Any:
        if any(map(has_mark, arguments)):
            raise RuntimeError("a planned defect")
        return method(self, *arguments, **more)

    generate = raise_over_http if protocol == "http" else raise_over_grpc
    expected = generate(marking_server, "say")
    assert "quick" in expected
    monkeypatch.setattr(owner, name, call)
    prompts = [MARK if index == MARKED else "say" for index in range(NUM_CALLS)]
    with ThreadPoolExecutor(NUM_CALLS) as pool:
        texts = list(pool.map(lambda prompt: generate(marking_server, prompt), prompts))
    failed = texts.pop(MARKED)
    assert "Internal server error; see the server log." in failed
    assert texts == [expected] * (NUM_CALLS - 1)
    wait_for(lambda: not marking_server.frontends.servicer.num_open_calls)


def raise_over_http(server: Server, prompt: str) -> str:
    """Return the text of a stream, or its error."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "stream": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0).text
    # Any: JSON.
    parts: list[Any] = [
        json.loads(part)
        for part in answer.replace("data: ", "").split("\n\n")
        if part.startswith("{")
    ]
    return "".join(
        part["error"]["message"] if "error" in part else part["choices"][0]["text"]
        for part in parts
    )


def raise_over_grpc(server: Server, prompt: str) -> str:
    """Return the text of a stream, or its error."""
    request = pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(max_tokens=20))
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        try:
            return "".join(s.text for m in stub.Generate(request, timeout=60) for s in m.sequences)
        except grpc.RpcError as error:
            return f"{error}"


# The longer ones are encoded in a thread.
PROMPTS = ("hi", "hi " * 2000)


def write_changed(folder: Path, target: Path, **parts: object) -> Path:
    """Write a tokenizer with other parts."""
    shutil.copytree(folder, target)
    path = target / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return target


@pytest.fixture(scope="module")
def panicking(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Divides by zero.
    parts = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    changed = write_changed(folder, tmp_path_factory.mktemp("panics") / "model", **parts)
    with Server(Tokenizer.from_folder(changed), context=8192) as server:
        yield server


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_http_calls_end_with_an_error_in_json(
    panicking: Server, caplog: pytest.LogCaptureFixture, path: str, prompt: str
) -> None:
    is_chat = path.endswith("chat/completions")
    given = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    response = httpx.post(f"{panicking.url}{path}", json={"model": "tiny", **given})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "Internal server error; see the server log."
    assert errors(caplog) == ["An HTTP request failed."]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long"])
def test_grpc_calls_end_before_their_deadline(
    panicking: Server, caplog: pytest.LogCaptureFixture, prompt: str
) -> None:
    with grpc.insecure_channel(panicking.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        calls = (
            lambda: list(stub.Generate(pb.GenerateRequest(text=prompt), timeout=60)),
            lambda: stub.Tokenize(pb.TokenizeRequest(text=prompt), timeout=60),
        )
        for call in calls:
            caplog.clear()
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert errors(caplog) == ["A gRPC call failed."]


def test_a_file_that_cannot_be_loaded_is_named(folder: Path, tmp_path: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "/wAAAA=="}
    changed = write_changed(folder, tmp_path / "model", normalizer=normalizer)
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not a valid tokenizer"):
        Tokenizer.from_folder(changed)


def test_unavailable_engine_says_when_to_retry(
    http: httpx.Client, stub: pagedray_pb2_grpc.GenerationServiceStub, engine: FakeEngine
) -> None:
    engine.rejection = EngineError("The engine has stopped.")
    engine.rejection.retry_after_s = 9.5
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "10"
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(text="x")))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    retry = RetryInfo()
    assert any(one.Unpack(retry) for one in status_of_call(caught.value).details)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 9.5


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
