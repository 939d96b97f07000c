"""SIGTERM drains a server whose ranks are Ray actors, as the defaults select them."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.fakes import wait_for
from tests.process_ends import still_running
from tests.system.grpc_streams import GrpcStream, GrpcStreams
from tests.system.server_process import ROOT, ServerProcess

KEY = "an API key of the test"
NUM_STREAMS = 32
TWO_RANKS = "--tensor-parallel-size=2"
LONG_DRAIN = "--drain-s=300"


@contextmanager
def streaming(
    *options: str, num_tokens: int, key: str = ""
) -> Iterator[tuple[ServerProcess, GrpcStreams]]:
    """Start a server, and streams of so many tokens that run."""
    with (
        ServerProcess(options) as server,
        GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=num_tokens, key=key) as streams,
    ):
        streams.start()
        yield server, streams


def kill_rank(server: ServerProcess) -> None:
    """Kill a rank, and wait until ranks are being replaced."""
    server.ranks()[-1].kill()
    wait_for(lambda: not server.is_ready())


def assert_drained(server: ServerProcess, streams: GrpcStreams, num_tokens: int) -> None:
    finished = GrpcStream(num_tokens=num_tokens, end="FINISH_REASON_LENGTH")
    assert streams.ended(300.0) == [finished] * NUM_STREAMS
    assert server.wait(120.0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_streams_finish_after_sigterm(num_ranks: int) -> None:
    ranks = f"--tensor-parallel-size={num_ranks}"
    with streaming(ranks, LONG_DRAIN, num_tokens=900) as (server, streams):
        server.send(signal.SIGTERM)
        assert_drained(server, streams, 900)


@pytest.mark.slow
def test_sigint_ends_streams_after_two_seconds() -> None:
    with streaming(TWO_RANKS, LONG_DRAIN, num_tokens=900) as (server, streams):
        family = server.family()
        assert server.interrupt(timeout_s=60.0) == 0
        ends = {stream.end for stream in streams.ended(60.0)}
        assert ends <= {"UNAVAILABLE", "FINISH_REASON_LENGTH"}
    assert still_running(family, 10.0) == []


@pytest.mark.slow
def test_sigterm_while_ranks_are_replaced_lets_streams_finish() -> None:
    with streaming(TWO_RANKS, LONG_DRAIN, num_tokens=300) as (server, streams):
        kill_rank(server)
        server.send(signal.SIGTERM)
        assert_drained(server, streams, 300)


@pytest.mark.slow
def test_second_signal_while_ranks_are_replaced_ends_the_server() -> None:
    with streaming(TWO_RANKS, LONG_DRAIN, num_tokens=900) as (server, streams):
        kill_rank(server)
        # Two equal signals could arrive as one.
        server.send(signal.SIGTERM)
        server.send(signal.SIGINT)
        assert {stream.end for stream in streams.ended(60.0)} == {"UNAVAILABLE"}
        assert server.wait(120.0) == 0


@pytest.mark.slow
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
    with streaming(*options, num_tokens=200, key=KEY) as (server, streams):
        server.send(signal.SIGTERM)
        assert_drained(server, streams, 200)
