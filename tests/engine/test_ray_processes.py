"""The processes of a Ray that this process started are found and killed."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import ray

from cluster.engine.ray_processes import kill_ray_processes, ray_processes
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
# Taken for a process of Ray by the path of its program.
PROGRAM = str(Path(ray.__file__).parent / "raylet")
# Ends, and leaves a child with an open file.
STARTER = """
import subprocess, sys
file = open(sys.argv[3], sys.argv[4])
command = [sys.executable, "-c", "import time; time.sleep(60)", *sys.argv[1:3]]
subprocess.Popen(command, pass_fds=[file.fileno()])
"""
# Exits while its threads start children, which sleep before they execute their program. The threads
# also sleep before they fork, so that some would do it after the others have been killed.
EXITING = """
import os, subprocess, sys, threading, time

os.register_at_fork(before=lambda: time.sleep(0.05))
from cluster.engine.ray_processes import kill_child_processes

def start():
    while True:
        command = ["sleep", "30", sys.argv[1]]
        subprocess.Popen(command, preexec_fn=lambda: time.sleep(0.05))

for _ in range(4):
    threading.Thread(target=start, daemon=True).start()
time.sleep(0.2)
kill_child_processes()
time.sleep(0.2)
os._exit(0)
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
        for process in psutil.process_iter(["cmdline"])
        if label in (process.info["cmdline"] or ())
    ]


def sleeping(label: str) -> list[psutil.Process]:
    return [process for process in labeled(label) if process.name() == "sleep"]


def test_no_process_is_left_that_starts_while_others_are_killed(label: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, PROGRAM, label]) as parent:
        wait_for(lambda: sleeping(label), 60.0)
        kill_ray_processes()
        assert parent.wait(60.0) < 0
    assert still_running(labeled(label), 20.0) == []


def test_no_child_is_left_that_has_not_executed_its_program(label: str) -> None:
    subprocess.run([sys.executable, "-c", EXITING, label], check=True)
    assert still_running(labeled(label), 20.0) == []


@pytest.mark.parametrize(
    ("program", "owner", "mode", "is_found"),
    [
        (PROGRAM, os.getpid(), "w", True),
        # Neither other programs, nor processes of another Ray, nor readers of a log.
        ("python", os.getpid(), "w", False),
        (PROGRAM, os.getppid(), "w", False),
        (PROGRAM, os.getpid(), "r", False),
    ],
    # Test processes that share the work must give each test the same name.
    ids=["daemon", "other program", "other owner", "reader"],
)
def test_process_whose_parent_has_ended_is_found_by_the_log_to_which_it_writes(
    tmp_path: Path, program: str, owner: int, mode: str, is_found: bool
) -> None:
    log = tmp_path / f"session_2026-01-01_00-00-00_000000_{owner}" / "logs" / "raylet.out"
    log.parent.mkdir(parents=True)
    log.touch()
    label = uuid.uuid4().hex
    arguments = (program, label, str(log), mode)
    subprocess.run([sys.executable, "-c", STARTER, *arguments], check=True)
    [orphan] = labeled(label)
    found = {process.pid for process in ray_processes()}
    orphan.kill()
    assert (orphan.pid in found) is is_found
