"""The third tier of the prefix cache: blocks in files of the ranks, found by the same keys.

The CPU blocks whose place is needed next are written in advance, so that no step waits for a disk.
What a prompt needs is read into CPU blocks, from where it comes back like all that they keep. Each
rank reads and writes its own part of a block; a block is whole once all of them have, and lost if
one of them could not.
"""

from collections import deque
from itertools import islice

from cluster.scheduling.cpu_prefix_cache import BlockIndex, CpuPrefixCache
from cluster.scheduling.prefix_cache import BlockKey
from pagedray.batch import BlockCopy, DiskReport

__all__ = ["DiskPrefixCache"]

_MAX_AHEAD = 256
"""CPU blocks that are free, or on the disk already, before others need their place."""
_MAX_WRITING = 64
_PAUSE_STEPS = 256
"""Steps without writes after one failed: a full disk rarely becomes free sooner."""


class DiskPrefixCache(BlockIndex):
    """Moves blocks between the CPU pool and the disk."""

    __slots__ = (
        "_cpu_cache",
        "_num_writing",
        "_paused_step",
        "_reading",
        "_reads",
        "_scanned",
        "_step_of",
        "_writing",
        "num_failed_reads",
        "num_failed_writes",
        "num_read_blocks",
        "num_reading",
        "num_written_blocks",
        "read_step",
    )

    def __init__(self, num_blocks: int, cpu_cache: CpuPrefixCache) -> None:
        super().__init__(num_blocks)
        self._cpu_cache = cpu_cache
        self._reads: list[BlockCopy] = []
        """The reads of the plan that is being made."""
        self._reading: deque[tuple[int, list[BlockCopy]]] = deque()
        """Steps and their reads, from disk blocks to CPU blocks, until every rank has made them."""
        self._writing: deque[tuple[int, list[BlockCopy]]] = deque()
        """Steps and their writes, from CPU blocks to disk blocks, until every rank has made
        them."""
        self.num_reading = 0
        """Blocks that are being read."""
        self._num_writing = 0
        self._step_of: dict[int, int] = {}
        """The steps that read CPU blocks."""
        self._scanned: tuple[int, int, int] | None = None
        """The state of the CPU pool in which there was nothing to write."""
        self._paused_step = -1
        """The step from which on blocks are written."""
        self.read_step = -1
        """The last step whose reads have ended."""
        self.num_read_blocks = self.num_written_blocks = 0
        self.num_failed_reads = self.num_failed_writes = 0

    def num_readable(self, num_kept: int) -> int:
        """Return how many blocks may be read while the CPU pool keeps some that a prompt needs."""
        pool = self._cpu_cache.pool
        # Half of the pool is left to sequences that are swapped out and to blocks being saved.
        return max(0, min(pool.num_free - num_kept, pool.num_blocks // 2 - self.num_reading))

    def step_of_read(self, key: BlockKey) -> int | None:
        """Return the step that reads the block with this key, or None if none does."""
        cpu_block = self._cpu_cache.block_being_copied(key)
        return None if cpu_block is None else self._step_of.get(cpu_block)

    def read_blocks(self, keys: list[BlockKey], step: int) -> None:
        """Read blocks that are found, and that the CPU pool lacks, in the plan of `step`."""
        for key in keys:
            source = self.find_block(key)
            assert source is not None
            self.pool.share(source)
            self.pool.pin(source)
            self.pool.release(source)
            target = self._cpu_cache.add_block(key)
            self._reads.append(BlockCopy(source, target))
            self._step_of[target] = step
        self.num_reading += len(keys)

    def take_reads(self, step: int) -> list[BlockCopy]:
        """Return the reads for the plan of `step`."""
        reads, self._reads = self._reads, []
        if reads:
            self._reading.append((step, reads))
        return reads

    def take_writes(self, step: int) -> list[BlockCopy]:
        """Return writes for the plan of `step`: of the blocks that the CPU pool evicts next."""
        pool = self._cpu_cache.pool
        num_unused = pool.num_free - pool.num_idle
        state = self._cpu_cache.num_evicted_blocks, num_unused, self.num_written_blocks
        num_next = min(_MAX_AHEAD, max(pool.num_blocks // 4, 1)) - num_unused
        if num_next <= 0 or state == self._scanned or step < self._paused_step:
            return []
        num_most = min(_MAX_WRITING - self._num_writing, num_next, self.pool.num_free)
        chosen: list[tuple[int, BlockKey]] = []
        for block in islice(pool.idle_blocks, num_next):
            key = self._cpu_cache.key_of(block)
            if key is not None and not self.has_key(key):
                chosen.append((block, key))
        self._scanned = state if len(chosen) <= num_most else None
        writes = []
        for block, key in chosen[: max(num_most, 0)]:
            pool.share(block)
            pool.pin(block)
            pool.release(block)
            writes.append(BlockCopy(block, self.add_block(key)))
        if writes:
            self._writing.append((step, writes))
            self._num_writing += len(writes)
        return writes

    def note_report(self, report: DiskReport) -> int:
        """End the oldest reads or writes, which every rank has made or failed to make.

        Returns how many blocks these were.
        """
        failed = set(report.failed)
        if report.is_read:
            step, copies = self._reading.popleft()
            self._end_reads(copies, failed)
            self.read_step = step
        else:
            step, copies = self._writing.popleft()
            self._end_writes(copies, failed)
            if failed:
                self._paused_step = step + _PAUSE_STEPS
                self._scanned = None
        assert step == report.step
        return len(copies)

    def clear(self) -> None:
        """Forget all blocks: the files of new ranks are empty."""
        super().clear()
        self._reads.clear()
        self._reading.clear()
        self._writing.clear()
        self.num_reading = self._num_writing = 0
        self._step_of.clear()
        self._scanned = None
        self._paused_step = self.read_step = -1

    def _end_reads(self, copies: list[BlockCopy], failed: set[int]) -> None:
        self.num_reading -= len(copies)
        # The end of a prefix is useless without its beginning, so it is evicted first.
        for source, target in ((copy.source, copy.target) for copy in reversed(copies)):
            del self._step_of[target]
            if source in failed:
                self.num_failed_reads += 1
                self.fail_copy(source)
                self._cpu_cache.fail_copy(target)
            else:
                self.num_read_blocks += 1
                self.pool.unpin(source)
                self._cpu_cache.end_copy(target)

    def _end_writes(self, copies: list[BlockCopy], failed: set[int]) -> None:
        self._num_writing -= len(copies)
        for target in (copy.target for copy in copies):
            if target in failed:
                self.num_failed_writes += 1
                self.fail_copy(target)
            else:
                self.num_written_blocks += 1
                self.end_copy(target)
        pool = self._cpu_cache.pool
        for source in (copy.source for copy in reversed(copies)):
            pool.unpin(source)
            # It was the least recently used one before it was written.
            pool.age(source)
