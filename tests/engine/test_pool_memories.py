"""The memory of a group's CPU pools, from epoch to epoch."""

import os
from contextlib import closing

import pytest

from cluster.engine.rank_places import PoolMemories
from pagedray.node_memory import open_memory
from pagedray.rank_progress import PoolReport

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
