"""SIGTERM drains a server whose ranks are Ray actors, as the defaults select them."""

from __future__ import annotations

import hashlib
import signal
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.fakes import wait_for
from tests.system.grpc_streams import GrpcStream, GrpcStreams
from tests.system.server_process import ROOT, ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

KEY = "an API key of the test"
NUM_STREAMS = 32


def finished(num_tokens: int) -> list[GrpcStream]:
    return [GrpcStream(num_tokens=num_tokens, end="FINISH_REASON_LENGTH")] * NUM_STREAMS


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_streams_finish_after_sigterm(num_ranks: int) -> None:
    options = (f"--tensor-parallel-size={num_ranks}", "--drain-s=300")
    with (
        ServerProcess(options) as server,
        GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=900) as streams,
    ):
        streams.start()
        server.send(signal.SIGTERM)
        assert streams.ended(300.0) == finished(900)
        assert server.wait(30.0) == 0


@pytest.mark.slow
def test_sigint_ends_streams_after_two_seconds() -> None:
    with (
        ServerProcess(("--tensor-parallel-size=2", "--drain-s=300")) as server,
        GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=900) as streams,
    ):
        streams.start()
        server.send(signal.SIGINT)
        ends = {stream.end for stream in streams.ended(60.0)}
        assert ends <= {"UNAVAILABLE", "FINISH_REASON_LENGTH"}
        assert server.wait(30.0) == 0


def test_sigterm_while_ranks_are_replaced_lets_streams_finish() -> None:
    with (
        ServerProcess(("--tensor-parallel-size=2", "--drain-s=300")) as server,
        GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=300) as streams,
    ):
        streams.start()
        server.named("ray::GpuWorker")[-1].kill()
        wait_for(lambda: not server.is_ready())
        server.send(signal.SIGTERM)
        assert streams.ended(300.0) == finished(300)
        assert server.wait(30.0) == 0


@pytest.mark.slow
def test_second_signal_while_ranks_are_replaced_ends_the_server() -> None:
    with (
        ServerProcess(("--tensor-parallel-size=2", "--drain-s=300")) as server,
        GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=900) as streams,
    ):
        streams.start()
        server.named("ray::GpuWorker")[-1].kill()
        wait_for(lambda: not server.is_ready())
        # Two equal signals could arrive as one.
        server.send(signal.SIGTERM)
        server.send(signal.SIGINT)
        assert {stream.end for stream in streams.ended(60.0)} == {"UNAVAILABLE"}
        assert server.wait(30.0) == 0


def test_streams_finish_as_the_manifest_starts_the_server(tmp_path: Path) -> None:
    manifest = yaml.safe_load((ROOT / "deploy" / "single-pod" / "deployment.yaml").read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(f'[tenants.ann]\nkeys = ["sha256:{digest}"]\n')
    # The first argument is the model.
    options = [
        argument.replace("/etc/pagedray", str(tmp_path)) for argument in container["args"][1:]
    ]
    with (
        ServerProcess(tuple(options)) as server,
        GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=200, key=KEY) as streams,
    ):
        streams.start()
        server.send(signal.SIGTERM)
        assert streams.ended(300.0) == finished(200)
        assert server.wait(30.0) == 0
