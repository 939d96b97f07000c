"""The log line of a replacement says which ranks stayed, and where the seconds went."""

from __future__ import annotations

from cluster.engine.rank_places import RecoveryLog
from tests.clock import Clock


def test_line_has_every_phase_and_the_parts_of_each_rank() -> None:
    clock = Clock(100.0)
    recovery = RecoveryLog(clock=clock)
    clock.now_s += 0.25
    recovery.end_phase("left")
    clock.now_s += 1.5
    recovery.end_phase("first step")
    recovery.note_ranks(
        kept=[0, 2],
        replaced={1: "spare"},
        parts=[{"group": 0.25}, {"weights": 1.5, "model": 0.001}, {}],
    )
    assert str(recovery) == (
        "Replaced rank 1 (spare), kept ranks 0, 2 in 1.75 s: left 0.25, first step 1.50; "
        "rank 0: group 0.25; rank 1: weights 1.50."
    )


def test_line_of_a_group_without_survivors_names_none() -> None:
    recovery = RecoveryLog(clock=Clock(100.0))
    recovery.end_phase("processes")
    recovery.note_ranks(kept=[], replaced={1: "new process", 0: "spare"}, parts=[{}, {}])
    assert str(recovery).startswith("Replaced ranks 0 (spare), 1 (new process) in 0.00 s: ")


def test_time_in_which_no_phase_runs_is_not_counted() -> None:
    clock = Clock(100.0)
    recovery = RecoveryLog(clock=clock)
    clock.now_s += 0.5
    recovery.end_phase("connected")
    recovery.wait_for_phase()
    clock.now_s += 60.0
    recovery.start_phase()
    clock.now_s += 0.25
    # The plans of further steps are sent before the first one ends.
    recovery.start_phase()
    clock.now_s += 0.5
    recovery.end_phase("first step")
    recovery.note_ranks(kept=[], replaced={0: "spare"}, parts=[{}])
    assert str(recovery) == "Replaced rank 0 (spare) in 1.25 s: connected 0.50, first step 0.75."
