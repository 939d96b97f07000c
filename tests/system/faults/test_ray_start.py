"""A Ray that does not start in time is started once more."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.fakes import wait_for
from tests.system.server_process import ROOT, TINY_LLAMA, ready_line, serve_command

if TYPE_CHECKING:
    from pathlib import Path


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
    assert "Starting Ray once more: " in log.read_text()
