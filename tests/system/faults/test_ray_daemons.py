"""Ray's own processes hang: streams go on, and the server is ready again or exits."""

import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from tests.fakes import wait_for
from tests.orphan_guard import guarded_process
from tests.process_ends import still_running
from tests.system.grpc_streams import (
    FINISHED,
    NUM_STREAMS,
    GrpcStream,
    GrpcStreams,
    assert_ended,
    check_streams_finish,
)
from tests.system.server_process import ROOT, TINY_LLAMA, ServerProcess, ready_line, serve_command

DAEMONS = ("gcs_server", "raylet")
NUM_HUNG_STREAMS = 8
NOTICED_S = 25.0
"""It takes 10 s; on a busy machine only the time counts in which the server ran."""
EXIT_S = 90.0
NUM_BURNERS = 4
BUSY_S = 15.0
PAUSE_S = 15.0


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[ServerProcess]:
    with new_server(log) as server:
        yield server


def new_server(log: Path) -> ServerProcess:
    return ServerProcess(("--tensor-parallel-size=2", "--log-level=warning"), log=log)


def is_ready(server: ServerProcess) -> bool:
    try:
        return server.is_ready()
    except httpx.TransportError:
        return False


def lines(log: Path) -> list[str]:
    """Return what was logged, without the progress of the start."""
    return [line for line in log.read_text().splitlines() if not line.endswith(" ...")]


@pytest.mark.slow
@pytest.mark.parametrize("daemon", DAEMONS)
def test_hang_that_ends_leaves_no_alarm(server: ServerProcess, daemon: str, log: Path) -> None:
    num_lines = len(lines(log))
    with GrpcStreams(server, num_streams=NUM_HUNG_STREAMS, num_tokens=600) as streams:
        streams.start()
        (process,) = server.named(daemon)
        process.suspend()
        stopped_s = time.monotonic()
        wait_for(lambda: not is_ready(server), NOTICED_S)
        print(f"not ready after {time.monotonic() - stopped_s:.1f} s")
        assert server.metrics()["pagedray_healthy"] == 0.0
        process.resume()
        wait_for(lambda: is_ready(server), 5.0)
        assert streams.ended(60.0) == [finished(600)] * NUM_HUNG_STREAMS
    (line,) = lines(log)[num_lines:]
    assert "hangs. Ranks that die cannot be replaced; if that lasts 30 s" in line
    # Ray works as before.
    with GrpcStreams(server, num_streams=NUM_HUNG_STREAMS, num_tokens=300) as streams:
        streams.start()
        server.named("ray::GpuWorker")[0].kill()
        assert streams.ended(60.0) == [finished(300)] * NUM_HUNG_STREAMS
    wait_for(lambda: is_ready(server), 10.0)


@pytest.mark.slow
@pytest.mark.parametrize("daemon", DAEMONS)
def test_hang_that_lasts_ends_the_server_after_its_streams(daemon: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with new_server(log) as server:
        processes = [
            *server.named("ray::GpuWorker"),
            *server.named("gcs_server"),
            *server.named("raylet"),
        ]
        with GrpcStreams(server, num_streams=NUM_HUNG_STREAMS, num_tokens=900) as streams:
            streams.start()
            server.named(daemon)[0].suspend()
            assert streams.ended(EXIT_S) == [finished(900)] * NUM_HUNG_STREAMS
        assert server.wait(EXIT_S) == 1
    assert "hangs. Dead ranks cannot be replaced, so the server stops." in lines(log)[-1]
    assert still_running(processes, 30.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("daemon", DAEMONS)
def test_server_stops_although_a_daemon_hangs(daemon: str, tmp_path: Path) -> None:
    with new_server(tmp_path / "log") as server:
        family = server.family()
        server.named(daemon)[0].suspend()
        server.send(signal.SIGTERM)
        assert server.wait(EXIT_S) == 0
    assert still_running(family, 30.0) == []


@pytest.mark.slow
def test_busy_machine_and_pause_of_everything_are_no_hang(server: ServerProcess, log: Path) -> None:
    wait_for(lambda: is_ready(server), 10.0)
    num_lines = len(lines(log))
    with burners(NUM_BURNERS):
        end_s = time.monotonic() + BUSY_S
        while time.monotonic() < end_s:
            assert is_ready(server)
            time.sleep(0.5)
    family = server.family()
    for process in family:
        process.send_signal(signal.SIGSTOP)
    time.sleep(PAUSE_S)
    for process in family:
        process.send_signal(signal.SIGCONT)
    end_s = time.monotonic() + NOTICED_S
    while time.monotonic() < end_s:
        assert is_ready(server)
        time.sleep(0.5)
    assert lines(log)[num_lines:] == []


def finished(num_tokens: int) -> GrpcStream:
    return GrpcStream(num_tokens=num_tokens, end="FINISH_REASON_LENGTH")


def burn() -> None:
    while True:
        pass


@contextmanager
def burners(number: int) -> Iterator[None]:
    """Keep all cores busy several times over."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=burn, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


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
def own_log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def own_server(own_log: Path) -> Iterator[ServerProcess]:
    options = ("--tensor-parallel-size=2", "--log-level=warning")
    with ServerProcess(options, log=own_log) as process:
        yield process


@pytest.mark.slow
def test_streams_finish_without_a_raylet(own_server: ServerProcess, own_log: Path) -> None:
    check_streams_finish(
        own_server, own_log, lambda: own_server.named("raylet")[0].kill(), reason="has ended"
    )


@pytest.mark.slow
def test_streams_finish_without_the_files_of_ray(own_server: ServerProcess, own_log: Path) -> None:
    (socket,) = (
        Path(argument.partition("=")[2])
        for argument in own_server.named("raylet")[0].cmdline()
        if argument.startswith("--raylet_socket_name=")
    )
    # As a program does that cleans /tmp.
    check_streams_finish(
        own_server, own_log, lambda: shutil.rmtree(socket.parent), reason=f"{socket} was removed"
    )


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_streams_end_if_a_rank_cannot_be_replaced(own_server: ServerProcess, daemon: str) -> None:
    ranks = own_server.ranks()
    with GrpcStreams(own_server, num_streams=NUM_STREAMS, num_tokens=900) as streams:
        streams.start()
        own_server.named(daemon)[0].kill()
        ranks[0].kill()
        assert {stream.end for stream in streams.ended(30.0)} == {UNAVAILABLE}
    assert own_server.wait(60.0) == 1
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
    own_server: ServerProcess, own_log: Path, daemon: str, number: signal.Signals
) -> None:
    with GrpcStreams(own_server, num_streams=NUM_STREAMS, num_tokens=900) as streams:
        streams.start()
        own_server.named(daemon)[0].send_signal(number)
        assert {stream.end for stream in streams.ended(60.0)} == {UNAVAILABLE}
    assert own_server.wait(60.0) == 1
    text = own_log.read_text()
    assert "Starting the ranks again" not in text.partition("so the own_server stops.")[2]
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
    cluster: Node, own_log: Path, daemon: str, end: str
) -> None:
    with (
        ServerProcess(("--tensor-parallel-size=2",), log=own_log) as own_server,
        GrpcStreams(own_server, num_streams=NUM_STREAMS, num_tokens=100) as streams,
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
        # The own_server waits for a GCS that another process started, and which may return.
        assert own_server.wait(120.0) == 1


def daemons(server: subprocess.Popen[Any], name: str) -> list[psutil.Process]:
    """Return the living processes of Ray that a server has started, by name."""
    children = psutil.Process(server.pid).children()
    return [
        process
        for process in children
        if process.name() == name and process.status() != psutil.STATUS_ZOMBIE
    ]


def agents(server: subprocess.Popen[Any]) -> list[psutil.Process]:
    """Return the agents that run under the raylet of a server."""
    return [agent for raylet in daemons(server, "raylet") for agent in raylet.children()]


def has_loaded_ray(process: psutil.Process) -> bool:
    """Return whether a process has the library of Ray."""
    try:
        return "/_raylet." in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


# The last one waits for GCS, and no longer looks whether its raylet has ended before.
@pytest.mark.slow
@pytest.mark.parametrize(("num_agents", "num_loaded"), [(1, 0), (2, 0), (2, 2)])
def test_nothing_is_left_of_a_server_that_is_killed_while_ray_starts(
    num_agents: int, num_loaded: int
) -> None:
    command, environment = serve_command(TINY_LLAMA, "--device=cpu")
    with guarded_process(command, environment, stderr=subprocess.DEVNULL) as server:
        wait_for(
            lambda: (
                len(found := agents(server)) >= num_agents
                and sum(map(has_loaded_ray, found)) >= num_loaded
            ),
            120.0,
        )
        family = psutil.Process(server.pid).children(recursive=True)
    # Agents wait for GCS, which has ended, for a day.
    assert still_running(family, 60.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("daemon", "fault"),
    [("raylet", psutil.Process.suspend), ("gcs_server", psutil.Process.kill)],
)
def test_ray_that_fails_while_it_starts_is_started_once_more(
    tmp_path: Path, daemon: str, fault: Callable[[psutil.Process], None]
) -> None:
    log = tmp_path / "log"
    command, environment = serve_command(TINY_LLAMA, "--device=cpu")
    with (
        log.open("w") as errors,
        guarded_process(command, environment, stdout=subprocess.PIPE, stderr=errors) as server,
    ):
        wait_for(lambda: daemons(server, daemon), 60.0)
        (first,) = daemons(server, daemon)
        fault(first)
        ready_line(server)
        assert [len(daemons(server, name)) for name in ("gcs_server", "raylet")] == [1, 1]
        assert daemons(server, daemon) != [first]
        server.terminate()
        assert server.wait(60.0) == 0
    (line,) = (line for line in log.read_text().splitlines() if "Starting Ray again: " in line)
    logs = Path(line.partition("Ray's logs are in ")[2].rstrip("."))
    assert f"_{server.pid}/" in str(logs)
    # The process may not have begun its log yet.
    assert logs.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("daemon", "last_line", "place"),
    [
        ("raylet", "Loading weights", "The raylet of this node at "),
        ("gcs_server", "Starting 2 ranks", "Ray's control service (GCS) at "),
    ],
)
def test_the_end_of_ray_ends_the_start(daemon: str, last_line: str, place: str) -> None:
    command, environment = serve_command(
        TINY_LLAMA, "--device=cpu", "--tensor-parallel-size=2", "--num-threads=1"
    )
    with guarded_process(command, environment, stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        # Each line reports progress.
        while last_line not in server.stderr.readline():
            continue
        (process,) = daemons(server, daemon)
        process.kill()
        assert server.wait(60.0) == 2
        lines = server.stderr.read().splitlines()
    (line,) = (line for line in lines if not line.endswith(" ..."))
    assert line.startswith(f"pagedray: error: {place}")
    assert "has ended." in line
