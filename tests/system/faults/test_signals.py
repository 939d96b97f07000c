"""SIGTERM drains a server whose ranks are Ray actors, as the defaults select them."""

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import yaml

from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.orphan_guard import guarded_process
from tests.process_ends import still_running
from tests.system.grpc_streams import GrpcStream, GrpcStreams, assert_ended
from tests.system.server_process import ROOT, TINY_LLAMA, ServerProcess, serve_command

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


@pytest.mark.slow
def test_server_ends_together_with_ray() -> None:
    with ServerProcess(()) as server:
        family = server.family()
        # The server leads a session of its own.
        os.killpg(server.pid, signal.SIGTERM)
        assert server.wait(60.0) == 0
        assert_ended(family)


@pytest.mark.parametrize(
    ("executor", "second"),
    [
        pytest.param("ray", signal.SIGTERM, marks=pytest.mark.slow),
        ("local", signal.SIGINT),
    ],
)
def test_a_second_signal_ends_the_drain(executor: str, second: signal.Signals) -> None:
    sampling = pagedray_pb2.SamplingParams(max_tokens=900, ignore_eos=True, n=16)
    with (
        ServerProcess((f"--executor={executor}", "--drain-s=300")) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        service = pagedray_pb2_grpc.GenerationServiceStub(channel)
        stream = service.Generate(pagedray_pb2.GenerateRequest(text="x", sampling=sampling))
        next(stream)
        server.send(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        # It waits for the stream, which continues.
        next(stream)
        server.send(second)
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.wait(60.0) == 0


@pytest.mark.parametrize(
    ("executor", "number", "last_line"),
    [
        pytest.param("local", signal.SIGINT, "", marks=pytest.mark.slow),
        ("ray", signal.SIGINT, "Starting Ray"),
        pytest.param("ray", signal.SIGTERM, "Starting Ray", marks=pytest.mark.slow),
        pytest.param("ray", signal.SIGTERM, "Starting 1 rank", marks=pytest.mark.slow),
    ],
)
def test_signal_while_loading_ends_all_before_it_has_loaded(
    executor: str, number: signal.Signals, last_line: str
) -> None:
    command, environment = serve_command(TINY_LLAMA, "--device=cpu", f"--executor={executor}")
    pipe = subprocess.PIPE
    with guarded_process(command, environment, stdout=pipe, stderr=pipe) as process:
        assert process.stderr is not None
        # Each line reports progress.
        while last_line not in process.stderr.readline():
            continue
        if executor == "ray":
            # Amid the start of Ray's processes; a local rank may be ready by then.
            time.sleep(0.5)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120.0)
        assert process.returncode == 0
        # It did not finish loading.
        assert output == ""
    # Those too that started after the signal.
    wait_for(lambda: not _running_in_session(process.pid))


def _running_in_session(number: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == number and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
