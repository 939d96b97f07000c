"""`suffix` over HTTP and gRPC: the prompt that asks a model for the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
import transformers

from cluster.serving.text.tokenizer import Tokenizer
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.checkpoint import write_tokenizer
from tests.serving.conftest import Server
from tests.serving.text.sentencepiece_folder import write_sentencepiece

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Stub = pagedray_pb2_grpc.GenerationServiceStub
BODY: dict[str, Any] = {"model": "tiny", "prompt": "def quick(", "suffix": "  return fox\n"}
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
END = "<|file_sep|>"


@pytest.fixture(scope="module")
def infill_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("infilling")
    write_tokenizer(folder, special_tokens=(*MARKS, END))
    return folder


@pytest.fixture(scope="module")
def infill_server(infill_folder: Path) -> Iterator[Server]:
    with Server(Tokenizer.from_folder(infill_folder)) as server:
        yield server


def test_prompt_is_that_of_the_model_card(infill_folder: Path, infill_server: Server) -> None:
    infill_server.engine.reset()
    body = BODY | {"prompt": ["def quick(", ""]}
    answer = httpx.post(f"{infill_server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokenizer: Any = transformers.PreTrainedTokenizerFast(  # Any: untyped
        tokenizer_file=str(infill_folder / "tokenizer.json")
    )
    for request, prefix in zip(infill_server.engine.log.submitted, body["prompt"], strict=True):
        card = f"<|fim_prefix|>{prefix}<|fim_suffix|>  return fox\n<|fim_middle|>"
        assert request.prompt_token_ids == tuple(tokenizer(card).input_ids)


def test_middle_ends_where_another_file_begins(infill_server: Server) -> None:
    tokenizer = infill_server.tokenizer
    text = tokenizer.encode(f"x): pass{END}import", add_special_tokens=False)
    infill_server.engine.script = lambda request, index: text
    try:
        answers = [
            httpx.post(f"{infill_server.url}/v1/completions", json=body).json()["choices"][0]
            for body in (BODY, BODY | {"ignore_eos": True, "max_tokens": len(text)})
        ]
    finally:
        infill_server.engine.script = infill_server.script
    ends = [(one["text"], one["finish_reason"], one["stop_reason"]) for one in answers]
    assert ends == [("x): pass", "stop", None), ("x): passimport", "length", None)]


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"echo": True}, "suffix cannot be combined with echo.", "suffix"),
        (
            {"truncate_prompt_tokens": 5},
            "suffix cannot be combined with truncate_prompt_tokens.",
            "suffix",
        ),
        ({"prompt": [5]}, "suffix requires prompt to be a string or a list of strings.", "suffix"),
        (
            {"suffix": "~" * 300},
            "prompt has 309 tokens, but the context length of 256 allows at most 255 and one "
            "generated token.",
            "prompt",
        ),
    ],
)
def test_what_has_no_middle_is_rejected(
    infill_server: Server, fields: dict[str, Any], message: str, param: str
) -> None:
    infill_server.engine.reset()
    answer = httpx.post(f"{infill_server.url}/v1/completions", json=BODY | fields)
    assert answer.status_code == 400
    assert (answer.json()["error"]["message"], answer.json()["error"]["param"]) == (message, param)
    assert infill_server.engine.log.submitted == []


@pytest.mark.parametrize("prefix", ["def quick(", ""])
@pytest.mark.parametrize("ignores_eos", [False, True])
def test_grpc_asks_and_ends_as_http_does(
    infill_server: Server, prefix: str, ignores_eos: bool
) -> None:
    tokenizer = infill_server.tokenizer
    text = tokenizer.encode(f"x): pass{END}import", add_special_tokens=False)
    infill_server.engine.reset()
    infill_server.engine.script = lambda request, index: text
    fields = {"prompt": prefix, "max_tokens": len(text), "ignore_eos": ignores_eos}
    message = pb.GenerateRequest(
        text=prefix,
        suffix=BODY["suffix"],
        sampling=pb.SamplingParams(max_tokens=len(text), ignore_eos=ignores_eos),
    )
    try:
        answer = httpx.post(f"{infill_server.url}/v1/completions", json=BODY | fields).json()
        with grpc.insecure_channel(infill_server.grpc_target) as channel:
            stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
            outputs = [one for found in stub.Generate(message) for one in found.sequences]
    finally:
        infill_server.engine.script = infill_server.script
    assert "".join(one.text for one in outputs) == answer["choices"][0]["text"]
    over_http, over_grpc = infill_server.engine.log.submitted
    assert over_grpc.prompt_token_ids == over_http.prompt_token_ids
    assert over_grpc.eos_token_ids == over_http.eos_token_ids


@pytest.mark.parametrize("prompt", [{"token_ids": pb.TokenIds(ids=[5])}, {}])
def test_grpc_rejects_a_suffix_without_a_text(
    infill_server: Server, prompt: dict[str, Any]
) -> None:
    infill_server.engine.reset()
    with grpc.insecure_channel(infill_server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(suffix="x", **prompt)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "suffix requires text."
    assert infill_server.engine.log.submitted == []


def test_middle_keeps_its_leading_space(tmp_path: Path) -> None:
    library = write_sentencepiece(tmp_path, ("[PREFIX]", "[MIDDLE]", "[SUFFIX]"))
    with Server(Tokenizer.from_folder(tmp_path)) as server:
        server.engine.script = lambda request, index: [
            library.piece_to_id("\u2581x"),
            library.piece_to_id("[MIDDLE]"),
        ]
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY).json()
    assert answer["choices"][0]["text"] == " x"


def test_tokenizers_without_the_tokens_are_named(server: Server, stub: Stub) -> None:
    message = (
        "suffix is not supported: the model's tokenizer has no known fill-in-the-middle tokens."
    )
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(text="x", suffix="y")))
    assert caught.value.details() == message
