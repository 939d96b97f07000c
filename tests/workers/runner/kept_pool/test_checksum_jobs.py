"""When the checksums of copied blocks are computed, and what waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from pagedray.batch import BlockCopy, StepPlan
from tests.fakes import wait_for
from workers.runner.checksum_jobs import BYTES_PER_BLOCK, BlockChecksums, ChecksumJobs

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class FakeFence:
    """Copies that end when a test says so."""

    is_reached: bool = False


@pytest.fixture
def checksums() -> BlockChecksums:
    return BlockChecksums(torch.ones(6, 5), memoryview(bytearray(6 * BYTES_PER_BLOCK)))


@pytest.fixture
def jobs(checksums: BlockChecksums) -> Iterator[ChecksumJobs]:
    jobs = ChecksumJobs(checksums)
    yield jobs
    jobs.close()


def eviction(step: int, *targets: int) -> StepPlan:
    return StepPlan(step, [], evictions=[BlockCopy(0, target) for target in targets])


def test_a_step_is_copied_once_its_blocks_have_checksums(
    checksums: BlockChecksums, jobs: ChecksumJobs
) -> None:
    copies = FakeFence()
    fence = jobs.follow(copies, eviction(0, 1, 3))
    assert not fence.is_reached
    assert len(checksums.damaged_blocks()) == 6
    copies.is_reached = True
    wait_for(lambda: fence.is_reached)
    assert checksums.damaged_blocks() == (0, 2, 4, 5)


def test_a_later_step_without_copies_waits_for_earlier_checksums(
    checksums: BlockChecksums, jobs: ChecksumJobs
) -> None:
    copies = FakeFence()
    jobs.follow(copies, eviction(0, 1))
    fence = jobs.follow(copies, StepPlan(1, []))
    assert not fence.is_reached
    copies.is_reached = True
    # The first fence is not looked at.
    wait_for(lambda: fence.is_reached)
    assert 1 not in checksums.damaged_blocks()


def test_a_step_does_not_wait_for_later_checksums(jobs: ChecksumJobs) -> None:
    first = jobs.follow(FakeFence(is_reached=True), StepPlan(0, []))
    jobs.follow(FakeFence(), eviction(1, 1))
    assert first.is_reached


def test_what_a_plan_writes_has_no_checksum_before(
    checksums: BlockChecksums, jobs: ChecksumJobs
) -> None:
    for block in range(6):
        checksums.note_block(block)
    plan = StepPlan(
        0,
        [],
        evictions=[BlockCopy(0, 1)],
        swap_outs=[BlockCopy(0, 2)],
        swap_ins=[BlockCopy(3, 0)],
        disk_reads=[BlockCopy(0, 4)],
        disk_writes=[BlockCopy(5, 0)],
    )
    jobs.begin(plan)
    assert checksums.damaged_blocks() == (1, 2, 4)


def test_nothing_is_computed_after_the_end(checksums: BlockChecksums) -> None:
    jobs = ChecksumJobs(checksums)
    copies = FakeFence()
    fence = jobs.follow(copies, eviction(0, 1))
    jobs.close()
    copies.is_reached = True
    assert not fence.is_reached
    assert len(checksums.damaged_blocks()) == 6
