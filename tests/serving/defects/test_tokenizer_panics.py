"""A tokenizer whose library panics ends its calls with an error, like any other defect."""

from __future__ import annotations

import json
import logging
import shutil
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest

from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import CheckpointError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
