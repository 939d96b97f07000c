"""Computes the checksums of blocks in a thread, once the copies to them have ended.

A step counts as copied only after that: then a block that the scheduler believes to be whole has a
checksum.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pagedray.batch import StepPlan

__all__ = ["BYTES_PER_BLOCK", "BlockChecksums", "ChecksumJobs", "Fence"]

logger = logging.getLogger(__name__)

BYTES_PER_BLOCK = 8
_IS_KNOWN = 1 << 32
"""Added to a checksum, so that zero means that there is none."""


class Fence(Protocol):
    """The copies of a step and of earlier steps."""

    @property
    def is_reached(self) -> bool:
        """Whether all of them have ended."""


class _Job(NamedTuple):
    """The copies of one plan, and the blocks that get their content by them."""

    fence: Fence
    blocks: list[int]


class _CheckedFence:
    """The copies up to a step, and the checksums of the copied blocks."""

    def __init__(self, fence: Fence, jobs: ChecksumJobs, num_jobs: int) -> None:
        self._fence, self._jobs, self._num_jobs = fence, jobs, num_jobs

    @property
    def is_reached(self) -> bool:
        return self._fence.is_reached and self._jobs.have_ended(self._num_jobs)


class ChecksumJobs:
    """The checksums of one epoch, in the order of its plans."""

    def __init__(self, checksums: BlockChecksums) -> None:
        self._checksums = checksums
        self._waiting: deque[_Job] = deque()
        """Jobs with copies that had not ended at the last look."""
        self._queue: SimpleQueue[list[int] | None] = SimpleQueue()
        self._num_jobs = self._num_ended = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pagedray-checksums", daemon=True)
        self._thread.start()

    def begin(self, plan: StepPlan) -> None:
        """Forget the checksums of the blocks that a plan writes; call this before it is launched.

        Reads of files note the checksums of their blocks themselves.
        """
        written = [*plan.evictions, *plan.swap_outs, *plan.disk_reads]
        if written:
            self._checksums.forget_blocks([copy.target for copy in written])

    def follow(self, fence: Fence, plan: StepPlan) -> Fence:
        """Return a fence that is reached once the checksums up to a plan are computed too."""
        if plan.evictions:
            self._waiting.append(_Job(fence, [copy.target for copy in plan.evictions]))
            self._num_jobs += 1
        return _CheckedFence(fence, self, self._num_jobs)

    def have_ended(self, num_jobs: int) -> bool:
        """Return whether the first `num_jobs` have ended; start the jobs that can run."""
        while self._waiting and self._waiting[0].fence.is_reached:
            self._queue.put(self._waiting.popleft().blocks)
        return self._num_ended >= num_jobs

    def close(self) -> None:
        """Compute no more; waits for the block at which the thread is."""
        self._is_closed = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (blocks := self._queue.get()) is not None:
            for block in blocks:
                if self._is_closed:
                    return
                self._checksums.note_block(block)
            self._num_ended += 1


class BlockChecksums:
    """The checksum of each kept block. Thread-safe for different blocks."""

    def __init__(self, blocks: torch.Tensor, memory: memoryview) -> None:
        """`memory` has `BYTES_PER_BLOCK` for each of the blocks, and outlives the rank."""
        self._blocks: npt.NDArray[np.uint8] = blocks.view(len(blocks), -1).view(torch.uint8).numpy()
        self._known = np.frombuffer(memory, dtype=np.uint64)
        assert len(self._known) == len(blocks)

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        """Forget the checksums of blocks that are about to change."""
        self._known[blocks] = 0

    def note_block(self, block: int) -> None:
        """Compute the checksum of a block, which must not change anymore."""
        self._known[block] = self._checksum(block)

    def damaged_blocks(self) -> tuple[int, ...]:
        """Return the blocks with a missing or wrong checksum; reads all others."""
        known = [int(block) for block in np.flatnonzero(self._known)]
        # zlib releases the GIL.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            found = dict(zip(known, threads.map(self._checksum, known), strict=True))
        table = self._known.tolist()
        num_wrong = sum(found[block] != table[block] for block in known)
        if num_wrong:
            logger.warning(
                "Dropping %s of %s blocks in the CPU pool of a rank that has ended: their contents "
                "have changed.",
                num_wrong,
                len(known),
            )
        return tuple(block for block, checksum in enumerate(table) if found.get(block) != checksum)

    def _checksum(self, block: int) -> int:
        return _IS_KNOWN | zlib.crc32(memoryview(self._blocks[block]))
