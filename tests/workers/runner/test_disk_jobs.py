"""Blocks in the file of a rank: what comes back, and what a disk may do."""

import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pagedray.batch import BlockCopy, DiskReport, StepPlan
from workers.runner.disk_jobs import DiskFile, DiskJobs

BLOCK_BYTES = 2 * 3 * 64 * 2


def make_blocks(number: int = 6) -> torch.Tensor:
    return torch.randn(number, 2, 3, 64, dtype=torch.float32).to(torch.bfloat16)


def reported(jobs: DiskJobs) -> DiskReport:
    """Return the next report."""
    while (report := jobs.take_report()) is None:
        assert jobs.are_pending
        time.sleep(1e-3)
    return report


def write(jobs: DiskJobs, *pairs: tuple[int, int], step: int = 0) -> DiskReport:
    """Write CPU blocks to disk blocks."""
    jobs.launch(StepPlan(step, [], disk_writes=[BlockCopy(*pair) for pair in pairs]))
    return reported(jobs)


def read(jobs: DiskJobs, *pairs: tuple[int, int], step: int = 0) -> DiskReport:
    """Read disk blocks into CPU blocks."""
    jobs.launch(StepPlan(step, [], disk_reads=[BlockCopy(*pair) for pair in pairs]))
    return reported(jobs)


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process get longer, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_blocks_come_back_bit_for_bit_and_leave_no_file(tmp_path: Path) -> None:
    blocks = make_blocks()
    expected = blocks.clone()
    jobs = DiskJobs(str(tmp_path), blocks)
    assert list(tmp_path.iterdir()) == []
    report = write(jobs, (0, 7), (1, 2), step=3)
    assert (report.step, report.is_read, report.failed) == (3, False, [])
    report = read(jobs, (7, 5), (2, 4), step=4)
    assert (report.step, report.is_read, report.failed) == (4, True, [])
    assert report.seconds > 0.0
    assert torch.equal(blocks[[5, 4]], expected[[0, 1]])
    assert torch.equal(blocks[:4], expected[:4])
    assert not jobs.are_pending
    jobs.close()


def test_what_a_full_disk_does_not_take_is_reported_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = make_blocks()
    jobs = DiskJobs(str(tmp_path), blocks)
    with file_limit(2 * BLOCK_BYTES + 5):
        assert write(jobs, (0, 0), (1, 1), (2, 2), (3, 3)).failed == [2, 3]
    assert read(jobs, (2, 5), (1, 4)).failed == [2]
    assert torch.equal(blocks[4], blocks[1])
    # Room was made.
    assert write(jobs, (2, 2)).failed == []
    assert read(jobs, (2, 5)).failed == []
    assert torch.equal(blocks[5], blocks[2])
    lines = [record.message for record in caplog.records if "written to" in record.message]
    assert lines == [f"KV blocks could not be written to {tmp_path}: File too large."]
    jobs.close()


@pytest.mark.parametrize("damage", ["changed", "short"])
def test_a_block_that_is_not_as_it_was_is_not_read(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = make_blocks()
    before = blocks.clone()
    jobs = DiskJobs(str(tmp_path), blocks)
    write(jobs, (0, 0), (1, 1))
    assert jobs._file is not None
    if damage == "changed":
        os.pwrite(jobs._file._descriptor, b"\x00\x01", BLOCK_BYTES + 9)
    else:
        os.ftruncate(jobs._file._descriptor, 2 * BLOCK_BYTES - 1)
    assert read(jobs, (1, 5), (0, 4)).failed == [1]
    assert torch.equal(blocks[5], before[5])
    assert torch.equal(blocks[4], before[0])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    jobs.close()


def test_a_folder_that_vanishes_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    blocks = make_blocks()
    jobs = DiskJobs(str(folder), blocks)
    folder.rmdir()
    assert write(jobs, (0, 0)).failed == []
    assert read(jobs, (0, 5)).failed == []
    assert torch.equal(blocks[5], blocks[0])
    jobs.close()


def test_without_the_folder_everything_fails_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "none"
    jobs = DiskJobs(str(folder), make_blocks())
    assert write(jobs, (0, 3)).failed == [3]
    assert read(jobs, (3, 0)).failed == [3]
    (record,) = caplog.records
    assert record.message == f"KV blocks are not kept in {folder}: No such file or directory."
    jobs.close()


def test_a_block_whose_write_failed_is_not_read_as_it_was_before(tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path), make_blocks())
    file.write_block(0, 0)
    with file_limit(0), pytest.raises(OSError, match="File too large"):
        file.write_block(1, 0)
    with pytest.raises(OSError, match="does not match its checksum"):
        file.read_block(0, 2)
    file.close()


class _HungFile(DiskFile):
    """A file whose reads answer only when they are released."""

    def __init__(self, folder: str, blocks: torch.Tensor) -> None:
        super().__init__(folder, blocks)
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.has_ended = threading.Event()

    def read_block(self, disk_block: int, cpu_block: int) -> None:
        self.has_begun.set()
        self.may_end.wait()
        try:
            super().read_block(disk_block, cpu_block)
        finally:
            self.has_ended.set()


def test_a_disk_that_hangs_is_given_up_and_changes_no_block_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("workers.runner.disk_jobs.DiskFile", _HungFile)
    blocks, now_s = make_blocks(), [0.0]
    before = blocks.clone()
    jobs = DiskJobs(str(tmp_path), blocks, clock=lambda: now_s[0])
    write(jobs, (0, 0))
    jobs.launch(StepPlan(1, [], disk_reads=[BlockCopy(0, 5)]))
    jobs.launch(StepPlan(2, [], disk_reads=[BlockCopy(0, 4)]))
    file = jobs._file
    assert isinstance(file, _HungFile)
    file.has_begun.wait()
    assert jobs.take_report() is None
    now_s[0] = 10.0
    assert [reported(jobs), reported(jobs)] == [DiskReport(1, True, [0]), DiskReport(2, True, [0])]
    # Others may have the blocks by now.
    file.may_end.set()
    file.has_ended.wait()
    assert torch.equal(blocks, before)
    assert write(jobs, (1, 1), step=3) == DiskReport(3, False, [1])
    assert not jobs.are_pending
    assert caplog.messages == [
        f"KV blocks could not be read from {tmp_path}: the disk did not answer for 10 s."
    ]


def test_a_disk_without_work_does_not_hang(tmp_path: Path) -> None:
    now_s = [0.0]
    jobs = DiskJobs(str(tmp_path), make_blocks(), clock=lambda: now_s[0])
    for step in range(3):
        assert write(jobs, (0, 0), step=step).failed == []
        assert read(jobs, (0, 1), step=step).failed == []
        now_s[0] += 60.0
        assert jobs.take_report() is None
    jobs.close()
