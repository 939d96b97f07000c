"""The memory of CPU pools from epoch to epoch, and the log line of a replacement."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from cluster.engine.rank_places import PoolMemories, RecoveryLog
from pagedray.node_memory import open_memory
from pagedray.rank_progress import PoolReport
from tests.clock import Clock

NEW = PoolReport(is_shared=True)
KEPT = PoolReport(is_shared=True, is_kept=True)


def kept_after(memories: PoolMemories, *reports: list[PoolReport]) -> bool:
    """Return whether the pools are kept after attempts to start ranks with these reports."""
    for one in reports:
        memories.note_reports(one)
    return memories.take_kept()


def test_pools_are_kept_only_if_every_rank_has_its_own() -> None:
    with closing(PoolMemories(2)) as memories:
        assert not kept_after(memories, [NEW, NEW])
        assert not kept_after(memories, [KEPT, NEW])
        assert kept_after(memories, [KEPT, KEPT])


def test_what_a_failed_start_lost_stays_lost() -> None:
    with closing(PoolMemories(2)) as memories:
        # The next rank has kept what was new when the one before it died.
        assert not kept_after(memories, [KEPT, NEW], [KEPT, KEPT])
        assert kept_after(memories, [KEPT, KEPT], [KEPT, KEPT])


def test_renewed_memory_is_empty_and_the_former_is_freed() -> None:
    with closing(PoolMemories(2)) as memories:
        before = [address for rank in range(2) if (address := memories.address(rank)) is not None]
        memories.renew()
        for address in before:
            with pytest.raises(FileNotFoundError):
                open_memory(address)
        for rank in range(2):
            address = memories.address(rank)
            assert address is not None
            descriptor = open_memory(address)
            assert os.fstat(descriptor).st_size == 0
            os.close(descriptor)


def test_a_rank_with_a_private_pool_gets_other_memory_next_time() -> None:
    with closing(PoolMemories(2)) as memories:
        before = [memories.address(rank) for rank in range(2)]
        # What the memory has is not what a later rank would look for.
        assert kept_after(memories, [KEPT, PoolReport(is_kept=True)])
        assert memories.address(0) == before[0]
        assert memories.address(1) != before[1]


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
