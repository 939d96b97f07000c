"""A Ray that fails while it starts is started once more; one that ends later ends the start."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes import wait_for
from tests.orphan_guard import guarded_process
from tests.process_ends import still_running
from tests.system.server_process import TINY_LLAMA, ready_line, serve_command


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
