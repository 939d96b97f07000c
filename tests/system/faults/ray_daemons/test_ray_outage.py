"""The end of Ray's own processes: no stream hangs, and the server exits to be restarted."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from tests.system.grpc_streams import GrpcStreams
from tests.system.ray_cluster.ray_end import (
    FINISHED,
    NUM_STREAMS,
    assert_ended,
    check_streams_finish,
)
from tests.system.server_process import ROOT, TINY_LLAMA, ServerProcess

POLLING = "ray_listen_error_messages"
"""A thread of Ray that polls GCS, and keeps a core and the GIL busy if calls fail at once."""
KILL_GCS = """
import json, os, threading, time
import psutil, ray
from cluster.engine.ray_health import RayHealth

def show_threads():
    print(json.dumps([thread.name for thread in threading.enumerate()]), flush=True)

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
health = RayHealth(reconnect_s=60.0, can_return=False)
show_threads()
for process in psutil.Process().children():
    if process.name() == "gcs_server":
        process.kill()
while health.outage is None:
    time.sleep(0.1)
# A poll may be under way.
time.sleep(1.0)
show_threads()
# Ray's own end would wait for GCS.
for process in psutil.Process().children(recursive=True):
    process.kill()
os._exit(0)
"""
KILL_GCS_AND_RAISE = """
import sys
import psutil
from pagedray import LLM

llm = LLM(sys.argv[1], device="cpu", num_threads=1, executor="ray")
for process in psutil.Process().children():
    if process.name() == "gcs_server":
        process.kill()
        process.wait()
raise RuntimeError("The program failed.")
"""
UNAVAILABLE = "UNAVAILABLE"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def server(log: Path) -> Iterator[ServerProcess]:
    options = ("--tensor-parallel-size=2", "--log-level=warning")
    with ServerProcess(options, log=log) as process:
        yield process


@pytest.mark.slow
def test_streams_finish_without_a_raylet(server: ServerProcess, log: Path) -> None:
    check_streams_finish(server, log, lambda: server.named("raylet")[0].kill(), reason="has ended")


@pytest.mark.slow
def test_streams_finish_without_the_files_of_ray(server: ServerProcess, log: Path) -> None:
    (socket,) = (
        Path(argument.partition("=")[2])
        for argument in server.named("raylet")[0].cmdline()
        if argument.startswith("--raylet_socket_name=")
    )
    # As a program does that cleans /tmp.
    check_streams_finish(
        server, log, lambda: shutil.rmtree(socket.parent), reason=f"{socket} was removed"
    )


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_streams_end_if_a_rank_cannot_be_replaced(server: ServerProcess, daemon: str) -> None:
    ranks = server.ranks()
    with GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=900) as streams:
        streams.start()
        server.named(daemon)[0].kill()
        ranks[0].kill()
        assert {stream.end for stream in streams.ended(30.0)} == {UNAVAILABLE}
    assert server.wait(60.0) == 1
    assert_ended(ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("daemon", "number"),
    [
        # Unlike one that is killed, it ends its workers and leaves the cluster.
        ("raylet", signal.SIGTERM),
        # It ends its raylet, in the same way.
        ("ray::DashboardAgent", signal.SIGKILL),
    ],
)
def test_streams_end_if_a_raylet_ends_together_with_its_ranks(
    server: ServerProcess, log: Path, daemon: str, number: signal.Signals
) -> None:
    with GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=900) as streams:
        streams.start()
        server.named(daemon)[0].send_signal(number)
        assert {stream.end for stream in streams.ended(60.0)} == {UNAVAILABLE}
    assert server.wait(60.0) == 1
    text = log.read_text()
    assert "Starting the ranks again" not in text.partition("so the server stops.")[2]
    # The streams did not wait for the end of the drain, and nor would a supervisor.
    assert "Ranks cannot be replaced." in text


@pytest.mark.slow
def test_no_thread_polls_a_gcs_that_has_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILL_GCS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before, after = map(json.loads, done.stdout.splitlines()[-2:])
    assert POLLING in before
    assert POLLING not in after


@pytest.mark.slow
def test_exception_of_a_program_is_printed_although_gcs_has_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILL_GCS_AND_RAISE, str(TINY_LLAMA)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=180.0,
    )
    assert done.returncode == 1
    assert "RuntimeError: The program failed." in done.stderr


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A Ray cluster that servers join; its only node."""
    joined = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    monkeypatch.setenv("RAY_ADDRESS", joined.address)
    assert joined.head_node is not None
    yield joined.head_node
    joined.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("daemon", "end"), [("gcs_server", FINISHED.end), ("raylet", UNAVAILABLE)])
def test_server_leaves_a_cluster_that_has_ended(
    cluster: Node, log: Path, daemon: str, end: str
) -> None:
    with (
        ServerProcess(("--tensor-parallel-size=2",), log=log) as server,
        GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=100) as streams,
    ):
        streams.start()
        (raylet,) = cluster.all_processes["raylet"]
        ranks = [
            process
            for process in psutil.Process(raylet.process.pid).children()
            if process.name() == "ray::GpuWorker"
        ]
        cluster.all_processes[daemon][0].process.kill()
        if daemon == "raylet":
            ranks[0].kill()
        assert {stream.end for stream in streams.ended(60.0)} == {end}
        # The server waits for a GCS that another process started, and which may return.
        assert server.wait(120.0) == 1
