"""A Ray that does not start in time is started once more; one that ends later ends the start."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.fakes import wait_for
from tests.system.server_process import ROOT, TINY_LLAMA, ready_line, serve_command


def daemons(server: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Return the living processes of Ray that a server has started, by name."""
    children = psutil.Process(server.pid).children()
    return [
        process
        for process in children
        if process.name() == name and process.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.slow
def test_ray_that_hangs_while_it_starts_is_started_once_more(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command, environment = serve_command(TINY_LLAMA, "--device=cpu")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as server,
        ExitStack() as stack,
    ):
        # Otherwise a test that fails would wait for it.
        stack.callback(server.kill)
        wait_for(lambda: daemons(server, "raylet"), 60.0)
        (first,) = daemons(server, "raylet")
        first.suspend()
        ready_line(server)
        assert len(daemons(server, "gcs_server")) == 1
        (second,) = daemons(server, "raylet")
        assert second != first
        server.terminate()
        assert server.wait(60.0) == 0
    (line,) = (line for line in log.read_text().splitlines() if "Starting Ray again: " in line)
    logs = Path(line.partition("Ray's logs are in ")[2].rstrip("."))
    assert f"_{server.pid}/" in str(logs)
    assert (logs / "raylet.out").is_file()


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
    with (
        subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.kill)
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
