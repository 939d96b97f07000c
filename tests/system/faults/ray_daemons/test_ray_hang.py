"""Ray's own processes hang: streams go on, and the server is ready again or exits."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes import wait_for
from tests.process_ends import still_running
from tests.system.grpc_streams import GrpcStream, GrpcStreams
from tests.system.server_process import ServerProcess

DAEMONS = ("gcs_server", "raylet")
NUM_STREAMS = 8
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
    with GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=600) as streams:
        streams.start()
        (process,) = server.named(daemon)
        process.suspend()
        stopped_s = time.monotonic()
        wait_for(lambda: not is_ready(server), NOTICED_S)
        print(f"not ready after {time.monotonic() - stopped_s:.1f} s")
        assert server.metrics()["pagedray_healthy"] == 0.0
        process.resume()
        wait_for(lambda: is_ready(server), 5.0)
        assert streams.ended(60.0) == [finished(600)] * NUM_STREAMS
    (line,) = lines(log)[num_lines:]
    assert "hangs. Ranks that die cannot be replaced; if that lasts 30 s" in line
    # Ray works as before.
    with GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=300) as streams:
        streams.start()
        server.named("ray::GpuWorker")[0].kill()
        assert streams.ended(60.0) == [finished(300)] * NUM_STREAMS
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
        with GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=900) as streams:
            streams.start()
            server.named(daemon)[0].suspend()
            assert streams.ended(EXIT_S) == [finished(900)] * NUM_STREAMS
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
