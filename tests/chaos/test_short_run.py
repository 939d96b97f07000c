"""Short runs of the program against real servers; `make chaos` is the long one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos.__main__ import main
from tests.chaos.history.events import CallEnded, FaultHealed, encode, read_history

if TYPE_CHECKING:
    from pathlib import Path

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
    assert main(["--target", "serve", *SMALL, *faults, *times]) == 0
