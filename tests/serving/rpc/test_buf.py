"""The gRPC service over reflection, and the rules for its wire format."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.serving.conftest import TEXT

if TYPE_CHECKING:
    from tests.serving.conftest import Server

ROOT = Path(__file__).resolve().parents[3]
PROTOS = ROOT / "protos"
BUF = Path(sys.executable).parent / "buf"
SERVICE = "pagedray.v1.GenerationService"


def _buf(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, BUF_CACHE_DIR=str(folder / "cache"), NO_PROXY="127.0.0.1")
    return subprocess.run(
        [str(BUF), *arguments], capture_output=True, text=True, timeout=60, env=environment,
        check=False,
    )  # fmt: skip


def _curl(folder: Path, server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    plain = ("--protocol", "grpc", "--http2-prior-knowledge")
    *options, path = arguments
    return _buf(folder, "curl", *plain, *options, f"http://{server.grpc_target}{path}")


def _call(folder: Path, server: Server, method: str, message: dict[str, Any]) -> list[Any]:
    # Any: JSON
    done = _curl(folder, server, "--data", json.dumps(message), f"/{SERVICE}/{method}")
    assert done.returncode == 0, done.stderr
    # The messages of a stream follow one another.
    decoder = json.JSONDecoder()
    found, rest = [], done.stdout.strip()
    while rest:
        one, end = decoder.raw_decode(rest)
        found.append(one)
        rest = rest[end:].strip()
    return found


def test_services_are_listed(server: Server, tmp_path: Path) -> None:
    done = _curl(tmp_path, server, "--list-services", "")
    assert done.returncode == 0, done.stderr
    assert {SERVICE, "grpc.health.v1.Health"} <= set(done.stdout.split())
    methods = _curl(tmp_path, server, "--list-methods", "").stdout
    assert f"{SERVICE}/GetLoads" in methods


def test_methods_are_called(server: Server, tmp_path: Path) -> None:
    sampling = {"maxTokens": 200, "stop": ["brown"]}
    answers = _call(tmp_path, server, "Generate", {"text": "x", "sampling": sampling})
    texts = [one.get("text", "") for answer in answers for one in answer.get("sequences", [])]
    assert "".join(texts) == TEXT.partition("brown")[0]
    turn = {"role": "CHAT_ROLE_USER", "content": "hello"}
    answers = _call(
        tmp_path,
        server,
        "Chat",
        {"messages": [turn], "sampling": {"maxTokens": 3}, "timeout": "9s"},
    )
    assert answers[-1]["usage"]["numGeneratedTokens"] == 3
    (info,) = _call(tmp_path, server, "GetServerInfo", {})
    assert (info["model"], info["numBlocks"]) == ("tiny", "64")


def test_rejection_shows_its_details(server: Server, tmp_path: Path) -> None:
    message = {"text": "x", "sampling": {"topP": 2}}
    done = _curl(tmp_path, server, "--data", json.dumps(message), f"/{SERVICE}/Generate")
    assert done.returncode != 0
    shown = json.loads(done.stderr)
    assert shown["code"] == "invalid_argument"
    assert {detail["type"] for detail in shown["details"]} == {
        "google.rpc.ErrorInfo", "google.rpc.BadRequest"
    }  # fmt: skip


def test_breaking_change_of_the_format_is_found(tmp_path: Path) -> None:
    # scripts/check verifies that the current format follows the rules.
    shutil.copytree(PROTOS, tmp_path / "protos")
    file = tmp_path / "protos" / "pagedray" / "v1" / "pagedray.proto"
    text = file.read_text()
    assert text.count("optional uint32 n = 11;") == 1
    file.write_text(text.replace("optional uint32 n = 11;", "optional int32 n = 11;"))
    baseline = ("--against", str(PROTOS / "baseline.binpb"))
    done = _buf(tmp_path, "breaking", str(tmp_path / "protos"), *baseline)
    assert done.returncode != 0
    (found,) = done.stdout.splitlines()
    assert 'Field "11" with name "n" on message "SamplingParams" changed type' in found
