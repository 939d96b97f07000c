"""When an engine counts as stuck, and the watchdog of a replica that loads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from cluster.serving.ray_serve.replica_engine import ProgressWatch
from tests.fakes import wait_for
from tests.process_ends import still_running

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = """
import os, signal, sys, time
from cluster.serving.ray_serve.load_watchdog import LoadWatchdog

with LoadWatchdog(timeout_s={timeout_s}, silence_s={silence_s}):
    print("loading", flush=True)
    {load}
print("loaded", flush=True)
time.sleep({after_s})
"""


class Loading:
    """A process that loads what `load` does, under a watchdog."""

    def __init__(
        self,
        load: str,
        *,
        timeout_s: float | None = None,
        silence_s: float = 1.0,
        after_s: float = 0,
    ) -> None:
        program = PROGRAM.format(
            load=load, timeout_s=timeout_s, silence_s=silence_s, after_s=after_s
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "loading\n"
        self.watchdogs = psutil.Process(self.process.pid).children()
        """One, or none if it has ended the process by now."""

    def ended(self, given: str = "") -> tuple[int, str, str]:
        """Return the exit code and the outputs after an input."""
        output, errors = self.process.communicate(given, timeout=120.0)
        return self.process.returncode, output, errors

    def close(self) -> None:
        """End both processes."""
        self.process.kill()
        self.process.communicate()
        assert still_running(self.watchdogs, 60.0) == []


def ignores_interrupts(process: psutil.Process) -> bool:
    """Return whether a process ignores SIGINT, as a watchdog does from its first check on."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (ignored,) = re.findall(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)
    return bool(int(ignored, 16) >> (signal.SIGINT - 1) & 1)


@pytest.fixture
def loading(request: pytest.FixtureRequest) -> Iterator[Loading]:
    loading = Loading(**request.param)
    yield loading
    loading.close()


@pytest.mark.parametrize(
    "loading", [{"load": "os.kill(os.getpid(), signal.SIGSTOP)"}], indirect=True
)
def test_a_process_that_stands_still_is_killed(loading: Loading) -> None:
    code, output, errors = loading.ended()
    assert (code, output) == (-signal.SIGKILL, "")
    assert errors == (
        f"The replica (process {loading.process.pid}) did not respond for 1 s while it loaded; "
        "ending it.\n"
    )


@pytest.mark.parametrize(
    "loading", [{"load": "time.sleep(60)", "timeout_s": 1.0, "silence_s": 10.0}], indirect=True
)
def test_a_process_that_does_not_load_in_time_is_killed(loading: Loading) -> None:
    code, _, errors = loading.ended()
    assert code == -signal.SIGKILL
    assert "did not load within 1 s" in errors


@pytest.mark.parametrize("loading", [{"load": "time.sleep(6)", "silence_s": 5.0}], indirect=True)
def test_a_process_that_loads_for_longer_than_the_limit_goes_on(loading: Loading) -> None:
    assert loading.ended() == (0, "loaded\n", "")
    assert still_running(loading.watchdogs, 60.0) == []


@pytest.mark.parametrize(
    "loading", [{"load": "sys.stdin.readline()", "silence_s": 1.5}], indirect=True
)
def test_a_pause_of_both_processes_is_no_hang(loading: Loading) -> None:
    # The watchdog pauses for longer, so that it sees no silence, however late this test is.
    (watchdog,) = loading.watchdogs
    wait_for(lambda: ignores_interrupts(watchdog))
    watchdog.suspend()
    os.kill(loading.process.pid, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(loading.process.pid, signal.SIGCONT)
    watchdog.resume()
    assert loading.ended("\n") == (0, "loaded\n", "")


@pytest.mark.parametrize("loading", [{"load": "pass", "after_s": 60}], indirect=True)
def test_no_watchdog_is_left_once_the_process_has_loaded_or_died(loading: Loading) -> None:
    assert loading.process.stdout is not None
    assert loading.process.stdout.readline() == "loaded\n"
    assert still_running(loading.watchdogs, 60.0) == []
    other = Loading("time.sleep(60)")
    other.process.kill()
    assert still_running(other.watchdogs, 60.0) == []
    other.close()


PERIOD_S = 5.0
STALL = "The engine has work but ran no step for 60 s."


class Replica:
    """A replica whose health is checked, in simulated time."""

    def __init__(self) -> None:
        self.watch = ProgressWatch(stall_timeout_s=60.0, replace_timeout_s=600.0)
        self.now_s = 0.0
        self.num_steps = 5

    def problem(self, *, has_work: bool = True, is_healthy: bool = True) -> str | None:
        """Check now."""
        return self.watch.problem(
            num_steps=self.num_steps, has_work=has_work, is_healthy=is_healthy, now_s=self.now_s
        )

    def problems_within(
        self, seconds: float, *, has_work: bool = True, is_healthy: bool = True
    ) -> set[str | None]:
        """Check regularly for some time; return what was found."""
        found = set()
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += PERIOD_S
            found.add(self.problem(has_work=has_work, is_healthy=is_healthy))
        return found


@pytest.fixture
def replica() -> Replica:
    replica = Replica()
    assert replica.problem() is None
    return replica


def test_work_without_steps_is_a_stall(replica: Replica) -> None:
    assert replica.problems_within(60) == {None}
    assert replica.problems_within(PERIOD_S) == {STALL}


def test_steps_are_progress(replica: Replica) -> None:
    for _ in range(50):
        replica.num_steps += 1
        assert replica.problems_within(50) == {None}


def test_a_pause_of_the_machine_is_no_stall(replica: Replica) -> None:
    for _ in range(5):
        replica.now_s += 3600.0
        assert replica.problem() is None
        replica.num_steps += 1
        assert replica.problem() is None
    assert replica.problems_within(65) == {None, STALL}


def test_an_idle_engine_is_not_stuck(replica: Replica) -> None:
    assert replica.problems_within(10_000, has_work=False) == {None}
    # Its first request has just arrived.
    assert replica.problems_within(60) == {None}
    assert replica.problems_within(PERIOD_S) == {STALL}


def test_replacing_ranks_may_take_long_but_not_forever(replica: Replica) -> None:
    assert replica.problems_within(600, is_healthy=False) == {None}
    assert replica.problems_within(PERIOD_S, is_healthy=False) == {
        "The ranks could not be replaced within 600 s."
    }
    # The first step of replaced ranks has the same time limit.
    assert replica.problems_within(60) == {None}
    assert replica.problems_within(PERIOD_S) == {STALL}
