"""Short runs of the program against real servers; `make chaos` is the long one."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.__main__ import main
from tests.chaos.events import CallEnded, FaultHealed, encode, read_history
from tests.orphan_guard import guarded_process
from tests.system.server_process import ROOT

SMALL = ("--streams", "12", "--requests", "8", "--max-tokens", "64")


@pytest.mark.slow
def test_streams_survive_other_clients_and_a_history_that_lost_one_is_rejected(
    tmp_path: Path,
) -> None:
    faults = ("--faults", "DisconnectClients", "CutConnections")
    times = ("--seconds", "2.5", "--every", "1")
    folder = ("--folder", str(tmp_path))
    assert main(["--executor", "local", *SMALL, *faults, *times, *folder]) == 0
    events = list(read_history(tmp_path / "history.jsonl"))
    assert any(isinstance(event, FaultHealed) for event in events)
    ended = [place for place, event in enumerate(events) if isinstance(event, CallEnded)]
    del events[ended[0]]
    shortened = tmp_path / "shortened.jsonl"
    shortened.write_bytes(b"".join(map(encode, events)))
    assert main(["--check", str(shortened)]) == 1


@pytest.mark.slow
def test_streams_survive_every_fault_of_ranks(tmp_path: Path) -> None:
    faults = ("KillRank", "KillTwoRanks", "KillDuringReplacement", "StopRank", "PauseEverything")
    times = ("--seconds", "50", "--every", "10", "--folder", str(tmp_path))
    assert main([*SMALL, "--faults", *faults, *times]) == 0


@pytest.mark.slow
def test_streams_survive_faults_of_replicas(tmp_path: Path) -> None:
    faults = ("--faults", "KillReplica", "DisconnectClients")
    times = ("--seconds", "40", "--every", "15", "--folder", str(tmp_path))
    # In another process, since this one may be connected to the Ray cluster that tests share.
    command = (sys.executable, "-m", "tests.chaos", "--target", "serve", *SMALL, *faults, *times)
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
def test_a_run_that_is_terminated_leaves_no_server(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tests.chaos", "--executor", "local", *SMALL)
    faults = ("--faults", "DisconnectClients", "--folder", str(tmp_path))
    with guarded_process((*command, *faults)) as process:
        servers = _first_children(process)
        process.terminate()
        process.wait(60.0)
    _, alive = psutil.wait_procs(servers, timeout=60)
    assert not alive


def _first_children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the children of a process, once it has some."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if children := psutil.Process(process.pid).children():
            return children
        time.sleep(0.05)
    pytest.fail("the program has started no server")
