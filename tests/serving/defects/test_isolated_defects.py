"""A defect in a stage of serving ends the call that meets it, over HTTP and gRPC, and no other."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from cluster.serving.engine_client import EngineStream
from cluster.serving.text.text_stream import TextStream
from cluster.serving.text.tokenizer import Tokenizer
from cluster.serving.validation.validator import Validator
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.serving.conftest import VOCAB_SIZE, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.request import Request

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

    generate = over_http if protocol == "http" else over_grpc
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


def over_http(server: Server, prompt: str) -> str:
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


def over_grpc(server: Server, prompt: str) -> str:
    """Return the text of a stream, or its error."""
    request = pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(max_tokens=20))
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        try:
            return "".join(s.text for m in stub.Generate(request, timeout=60) for s in m.sequences)
        except grpc.RpcError as error:
            return f"{error}"
