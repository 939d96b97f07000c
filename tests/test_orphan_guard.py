"""Servers end with the programs that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.orphan_guard import OrphanGuard
from tests.process_ends import still_running
from tests.system.server_process import ROOT

WAITING = """
import subprocess, sys, time
from tests.orphan_guard import OrphanGuard
server = subprocess.Popen(["sh", "-c", sys.argv[1]], start_new_session=True)
guard = OrphanGuard(server, grace_s=1.0)
print(server.pid, flush=True)
time.sleep(600)
"""
SERVING = """
import time
from tests.system.server_process import ServerProcess
with ServerProcess(("--executor=local",)) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""
TEST = """
import subprocess
def test_that_waits(capfd):
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        try:
            with capfd.disabled():
                print(process.pid, flush=True)
            process.wait()
        finally:
            process.kill()
"""
RUN_TEST = """
import sys, pytest
sys.exit(pytest.main(["--quiet", "--no-header", "-p", "tests.conftest", sys.argv[1]]))
"""
POOL = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from tests.orphan_guard import end_with_parent
context = multiprocessing.get_context("spawn")
with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""
OBEDIENT = "exec sleep 600"
DEAF = "trap '' INT; sleep 600; sleep 600"


def orphans(end: signal.Signals, program: str, *arguments: str) -> list[psutil.Process]:
    """Return the server that a program starts, and its children, once a signal has ended it."""
    command = (sys.executable, "-c", program, *arguments)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        family = [server, *server.children(recursive=True)]
        process.send_signal(end)
    return family


@pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_server_ends_with_its_program(end: signal.Signals) -> None:
    family = orphans(end, SERVING)
    assert still_running(family, 60.0) == []


def test_tests_that_are_terminated_end_what_they_started(tmp_path: Path) -> None:
    file = tmp_path / "test_waiting.py"
    file.write_text(TEST)
    family = orphans(signal.SIGTERM, RUN_TEST, str(file))
    assert still_running(family, 60.0) == []


@pytest.mark.parametrize("command", [OBEDIENT, DEAF])
def test_a_process_that_ignores_the_interrupt_is_killed(command: str) -> None:
    family = orphans(signal.SIGKILL, WAITING, command)
    assert still_running(family, 60.0) == []


def test_the_worker_of_a_pool_ends_with_its_program() -> None:
    family = orphans(signal.SIGKILL, POOL)
    assert still_running(family, 60.0) == []


def test_a_guard_that_is_released_leaves_a_process_alone() -> None:
    with subprocess.Popen(["sleep", "600"], text=True, start_new_session=True) as process:
        OrphanGuard(process, grace_s=0.0).release()
        time.sleep(0.2)
        assert process.poll() is None
        process.kill()
