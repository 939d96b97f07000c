"""Reads and writes of KV blocks in a file, by threads, while steps run.

No step waits for a disk. A failed job is reported and otherwise ignored, since only a copy in the
cache is lost; a job that hangs counts as failed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
import zlib
from collections import deque
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkstemp
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagedray.batch import BlockCopy, DiskReport, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt


__all__ = ["DiskFile", "DiskJobs"]

logger = logging.getLogger(__name__)

_HANG_S = 10.0
"""How long one block may take before the disk is no longer used."""


class _Job(NamedTuple):
    """The reads or writes of one plan."""

    step: int
    copies: list[BlockCopy]


class DiskJobs:
    """Reads and writes blocks of the CPU pool, in the order of plans for each of the two."""

    def __init__(
        self, folder: str, blocks: torch.Tensor, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`blocks` belong to the CPU pool. In an unusable folder, every job fails."""
        self._file: DiskFile | None = None
        try:
            self._file = DiskFile(folder, blocks)
        except OSError as error:
            logger.warning("KV blocks are not kept in %s: %s.", folder, error.strerror)
        self._lanes = (
            _Lane(self._file, folder, clock, is_read=True),
            _Lane(self._file, folder, clock, is_read=False),
        )

    @property
    def are_pending(self) -> bool:
        """Whether a report is to come."""
        return any(lane.is_pending for lane in self._lanes)

    def launch(self, plan: StepPlan) -> None:
        """Begin the reads and writes of a plan."""
        for lane, copies in zip(self._lanes, (plan.disk_reads, plan.disk_writes), strict=True):
            if copies:
                lane.submit(_Job(plan.step, copies))

    def take_report(self) -> DiskReport | None:
        """Return the next report, or None if there is none yet."""
        if any(lane.is_hung for lane in self._lanes):
            self._give_up()
        for lane in self._lanes:
            if lane.reports:
                return lane.reports.popleft()
        return None

    def close(self) -> None:
        """Change no block of the CPU pool anymore; threads end once the disk lets them."""
        self._give_up()

    def _give_up(self) -> None:
        """Let everything fail, now and later."""
        # First, so that no block is written that was reported as failed.
        if self._file is not None:
            self._file.close()
        for lane in self._lanes:
            lane.give_up()


class _Lane:
    """A thread that either reads or writes."""

    def __init__(
        self, file: DiskFile | None, folder: str, clock: Callable[[], float], *, is_read: bool
    ) -> None:
        """Without a file, everything fails."""
        self._file = file
        self._folder = folder
        self._clock = clock
        self._is_read = is_read
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._unreported: deque[_Job] = deque()
        self._began_s: float | None = None
        """When the thread began the block that it reads or writes."""
        self._has_warned = False
        self._is_given_up = file is None
        self.reports: deque[DiskReport] = deque()
        if file is not None:
            threading.Thread(target=self._run, name="pagedray-disk", daemon=True).start()

    @property
    def is_pending(self) -> bool:
        """Whether a report is to come."""
        return bool(self._unreported or self.reports)

    @property
    def is_hung(self) -> bool:
        """Whether the disk does not answer, and was not given up."""
        began_s = self._began_s
        if began_s is None or self._is_given_up or self._clock() - began_s < _HANG_S:
            return False
        self._warn(f"the disk did not answer for {_HANG_S:g} s")
        return True

    def submit(self, job: _Job) -> None:
        """Have the thread run a job."""
        with self._lock:
            self._unreported.append(job)
            if self._is_given_up:
                self._fail_all()
            else:
                self._queue.put(job)

    def give_up(self) -> None:
        """Fail all jobs, and end the thread."""
        with self._lock:
            self._is_given_up = True
            self._fail_all()
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            started_s = self._clock()
            failed = [self._disk_block(copy) for copy in job.copies if not self._copy(copy)]
            with self._lock:
                if self._is_given_up:
                    return
                self._unreported.popleft()
                seconds = self._clock() - started_s
                self.reports.append(DiskReport(job.step, self._is_read, failed, seconds))

    def _copy(self, copy: BlockCopy) -> bool:
        """Read or write a block; return whether that succeeded."""
        assert self._file is not None
        if self._is_given_up:
            return False
        self._began_s = self._clock()
        try:
            if self._is_read:
                self._file.read_block(copy.source, copy.target)
            else:
                self._file.write_block(copy.source, copy.target)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return False
        finally:
            self._began_s = None
        return True

    def _fail_all(self) -> None:
        while self._unreported:
            job = self._unreported.popleft()
            failed = [self._disk_block(copy) for copy in job.copies]
            self.reports.append(DiskReport(job.step, self._is_read, failed))

    def _disk_block(self, copy: BlockCopy) -> int:
        return copy.source if self._is_read else copy.target

    def _warn(self, reason: str) -> None:
        """Log the first failure; the scheduler counts all."""
        if not self._has_warned:
            self._has_warned = True
            what = "read from" if self._is_read else "written to"
            logger.warning("KV blocks could not be %s %s: %s.", what, self._folder, reason)


class DiskFile:
    """Writes blocks of a pool to a file, and reads them back. Thread-safe for different blocks."""

    def __init__(self, folder: str, blocks: torch.Tensor) -> None:
        """`blocks` belong to the CPU pool. Raises OSError if the folder takes no file."""
        self._blocks: npt.NDArray[np.uint8] = blocks.view(len(blocks), -1).view(torch.uint8).numpy()
        self._descriptor, path = mkstemp(dir=folder)
        weakref.finalize(self, os.close, self._descriptor)
        Path(path).unlink()
        self._checksums: dict[int, int] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def write_block(self, cpu_block: int, disk_block: int) -> None:
        """Write a block. Raises OSError."""
        content = memoryview(self._blocks[cpu_block])
        self._checksums.pop(disk_block, None)
        checksum = zlib.crc32(content)
        offset, num_written = disk_block * len(content), 0
        while num_written < len(content):
            rest = content[num_written:]
            num_written += os.pwrite(self._descriptor, rest, offset + num_written)
        self._checksums[disk_block] = checksum

    def read_block(self, disk_block: int, cpu_block: int) -> None:
        """Read a block. Raises OSError, also if it is not as it was written.

        The CPU block changes only if that succeeds, and never after `close`.
        """
        size = self._blocks.shape[1]
        content = os.pread(self._descriptor, size, disk_block * size)
        if zlib.crc32(content) != self._checksums.get(disk_block):
            raise OSError("a block does not match its checksum")
        with self._lock:
            if self._is_closed:
                raise OSError("the file is closed")
            self._blocks[cpu_block] = np.frombuffer(content, dtype=np.uint8)

    def close(self) -> None:
        """Change no CPU block anymore; the file is gone once no call uses it."""
        with self._lock:
            self._is_closed = True
