"""The processes of a Ray that this process started are found and killed."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import ray

from cluster.engine.ray_cluster.ray_processes import kill_ray_processes
from tests.fakes import wait_for
from tests.process_ends import still_running

if TYPE_CHECKING:
    from collections.abc import Iterator

# Its children end by themselves, so that a test that fails leaves none for long.
PARENT = """
import subprocess, sys, time
for _ in range(1000):
    subprocess.Popen(["sleep", "30", sys.argv[2]])
    time.sleep(0.001)
"""


@pytest.fixture
def label() -> Iterator[str]:
    """An argument by which the children are found, whatever their parent is."""
    label = f"0.{uuid.uuid4().int % 10**9}"
    yield label
    for process in labeled(label):
        process.kill()


def labeled(label: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "sleep" and label in (process.info["cmdline"] or ())
    ]


def test_no_process_is_left_that_starts_while_others_are_killed(label: str) -> None:
    # Taken for a daemon of Ray by the path of its program.
    program = str(Path(ray.__file__).parent / "raylet")
    with subprocess.Popen([sys.executable, "-c", PARENT, program, label]) as parent:
        wait_for(lambda: labeled(label), 60.0)
        kill_ray_processes()
        assert parent.wait(60.0) < 0
    assert still_running(labeled(label), 20.0) == []
