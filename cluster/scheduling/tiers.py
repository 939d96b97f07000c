"""The lower tiers of the prefix cache: blocks in the CPU pool and in files of the ranks.

Every tier finds blocks by the same keys. A tier keeps the blocks that the tier above it evicts, and
loads them into that tier again:

| tier | find | add | load | evict |
| --- | --- | --- | --- | --- |
| `DeviceTier` | `find_prefix` | `add_block` | - | saves verified blocks in the CPU pool |
| `CpuTier` | `find_block` | `save_block` | `DeviceTier.load_blocks` | forgets blocks |
| `DiskTier` | `find_block` | `take_writes` | `read_blocks` | forgets blocks |

Blocks are written to the disk before the CPU pool evicts them, so that no step waits for a disk.
Each rank reads and writes its own part of a block: a block is complete once all ranks have, and
lost if one rank could not. A sequence that is swapped out may take any block of the CPU pool, the
least recently used first.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from cluster.scheduling.block_pool import BlockPool
from pagedray.batch import BlockCopy, DiskReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.costs import TierPolicy
    from cluster.scheduling.device_tier import BlockKey

__all__ = ["BlockIndex", "CpuTier", "DiskTier"]

_MAX_AHEAD = 256
"""CPU blocks that are free, or on the disk already, before others need their place."""
_MAX_WRITING = 64
_PAUSE_STEPS = 256
"""Steps without writes after one failed: a full disk rarely becomes free sooner."""


class BlockIndex:
    """Maps the content of full blocks to blocks of a pool, one to one."""

    __slots__ = ("_block_of", "_incomplete", "_key_of", "num_evicted_blocks", "pool")

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._evict)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._incomplete: set[int] = set()
        """Blocks that are not found yet."""
        self.num_evicted_blocks = 0
        """Number of evicted blocks."""

    def __len__(self) -> int:
        return len(self._block_of)

    def find_block(self, key: BlockKey) -> int | None:
        """Return the block with this key, or None."""
        block = self._block_of.get(key.digest)
        if block is None or block in self._incomplete:
            return None
        return block if self._key_of[block].token_bytes == key.token_bytes else None

    def block_being_copied(self, key: BlockKey) -> int | None:
        """Return the block with this key that is still being copied, or None."""
        block = self._block_of.get(key.digest)
        return block if block in self._incomplete else None

    def has_key(self, key: BlockKey) -> bool:
        """Return whether a block has this key, although it may not be found yet."""
        return key.digest in self._block_of

    def key_of(self, block: int) -> BlockKey | None:
        """Return the key of a block, or None if it has none."""
        return self._key_of.get(block)

    def touch_key(self, key: BlockKey) -> bool:
        """Make the block with this key the most recently used; return False if there is none."""
        block = self._block_of.get(key.digest)
        if block is None:
            return False
        self.pool.touch(block)
        return True

    def add_block(self, key: BlockKey) -> int:
        """Allocate and return a block for a key that none has; `end_copy` must follow."""
        block = self.pool.allocate()
        self._block_of[key.digest] = block
        self._key_of[block] = key
        self._incomplete.add(block)
        self.pool.keep(block)
        self.pool.pin(block)
        self.pool.release(block)
        return block

    def end_copy(self, block: int) -> None:
        """Make a block available to look-ups, since its content has arrived."""
        self._incomplete.discard(block)
        self.pool.unpin(block)

    def fail_copy(self, block: int) -> None:
        """Make a block free after its copy has failed."""
        if block in self._key_of:
            self._remove(block)
            self.pool.discard(block)
        self.pool.unpin(block)

    def forget_key(self, key: BlockKey) -> None:
        """Remove the block with this key: its content is invalid."""
        block = self._block_of.get(key.digest)
        if block is not None:
            self._remove(block)
            self.pool.discard(block)

    def clear(self) -> None:
        """Free all blocks of the pool."""
        self.pool.clear()
        self._block_of.clear()
        self._key_of.clear()
        self._incomplete.clear()

    def retain_complete(self) -> list[int]:
        """Make every block free; return the complete blocks, which stay cached.

        The least recently used block is first.
        """
        idle = self.pool.idle_blocks
        # Blocks that sequences or copies use are the most recently used.
        blocks = [*idle, *(block for block in self._key_of if block not in idle)]
        kept = [one for one in blocks if one not in self._incomplete]
        key_of = {block: self._key_of[block] for block in kept}
        self.clear()
        self._key_of = key_of
        self._block_of = {key.digest: block for block, key in key_of.items()}
        self.pool.clear(idle=kept)
        return kept

    def _evict(self, block: int) -> None:
        self.num_evicted_blocks += 1
        self._remove(block)

    def _remove(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block).digest]
        self._incomplete.discard(block)


class CpuTier(BlockIndex):
    """Blocks of the CPU pool, which saves blocks evicted from the device pool."""

    __slots__ = (
        "_copies",
        "_in_flight",
        "_kept",
        "_max_saved",
        "is_enabled",
        "num_kept_blocks",
        "num_kept_hit_blocks",
        "num_loaded_blocks",
        "num_loaded_entries",
        "num_saved_blocks",
        "policy",
    )

    def __init__(
        self, num_blocks: int, *, policy: TierPolicy, max_saved: int, is_enabled: bool = True
    ) -> None:
        """A plan saves at most `max_saved` blocks, so that it does not take too long.

        If the tier is not enabled, the pool is used for swapped sequences only.
        """
        super().__init__(num_blocks)
        self._max_saved = max_saved
        self.is_enabled = is_enabled
        """Whether evicted blocks are saved."""
        self.policy = policy
        """Decides which copies are worth their time."""
        self._copies: list[BlockCopy] = []
        """The copies of the plan that is being made."""
        self._in_flight: deque[tuple[int, list[int]]] = deque()
        """Steps that are not acknowledged, and the blocks that they save."""
        self._kept: set[int] = set()
        """Blocks that outlived a rank."""
        self.num_saved_blocks = 0
        self.num_loaded_blocks = 0
        self.num_loaded_entries = 0
        """Entries of block tables with loaded blocks."""
        self.num_kept_blocks = 0
        """Blocks that outlived a rank, each time."""
        self.num_kept_hit_blocks = 0
        """The number of restored blocks that had outlived a rank."""

    def save_block(self, key: BlockKey, device_block: int) -> None:
        """Copy an evicted block in the plan that is being made, if that is worth it."""
        if not self.is_enabled or self.touch_key(key) or not self.policy.is_saved(key.digest):
            return
        if not self.pool.num_free or len(self._copies) >= self._max_saved:
            self.policy.note_lost(key.digest)
            return
        self._copies.append(BlockCopy(device_block, self.add_block(key)))
        self.num_saved_blocks += 1

    def take_copies(self, step: int) -> list[BlockCopy]:
        """Return the copies for the plan of `step`."""
        copies, self._copies = self._copies, []
        if copies:
            self._in_flight.append((step, [copy.target for copy in copies]))
        return copies

    def acknowledge(self, step: int) -> None:
        """Make blocks available that were saved up to `step`, which every rank has finished."""
        while self._in_flight and self._in_flight[0][0] <= step:
            for block in self._in_flight.popleft()[1]:
                self.end_copy(block)

    def begin_loads(self, blocks: Sequence[int], *, num_entries: int) -> None:
        """Pin and count blocks that are copied back, of `num_entries` of a block table."""
        self.num_loaded_entries += num_entries
        for block in blocks:
            self.pool.pin_cached(block)
        self.num_loaded_blocks += len(blocks)
        if self._kept:
            self.num_kept_hit_blocks += sum(block in self._kept for block in blocks)

    def begin_epoch(self, *, is_kept: bool) -> None:
        """Keep the blocks that were complete before ranks were replaced, if pools are kept."""
        if not is_kept:
            self.clear()
            return
        kept = self.retain_complete()
        self._kept.update(kept)
        self.num_kept_blocks += len(kept)

    def clear(self) -> None:
        super().clear()
        self._copies.clear()
        self._in_flight.clear()
        self._kept.clear()
        self.policy.clear()

    def _remove(self, block: int) -> None:
        super()._remove(block)
        self._kept.discard(block)


class DiskTier(BlockIndex):
    """Blocks on the disk, which are written from the CPU pool and read into it."""

    __slots__ = (
        "_cpu",
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

    def __init__(self, num_blocks: int, cpu: CpuTier) -> None:
        super().__init__(num_blocks)
        self._cpu = cpu
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
        """The last step with ended reads."""
        self.num_read_blocks = self.num_written_blocks = 0
        self.num_failed_reads = self.num_failed_writes = 0

    def num_readable(self, num_kept: int) -> int:
        """Return how many blocks may be read while the CPU pool keeps some that a prompt needs."""
        pool = self._cpu.pool
        # Half of the pool is left to sequences that are swapped out and to blocks being saved.
        return max(0, min(pool.num_free - num_kept, pool.num_blocks // 2 - self.num_reading))

    def step_of_read(self, key: BlockKey) -> int | None:
        """Return the step that reads the block with this key, or None if none does."""
        cpu_block = self._cpu.block_being_copied(key)
        return None if cpu_block is None else self._step_of.get(cpu_block)

    def read_blocks(self, keys: list[BlockKey], step: int) -> None:
        """Read blocks that are found, and that the CPU pool lacks, in the plan of `step`."""
        for key in keys:
            source = self.find_block(key)
            assert source is not None
            self.pool.pin_cached(source)
            target = self._cpu.add_block(key)
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
        pool = self._cpu.pool
        num_unused = pool.num_free - pool.num_idle
        state = self._cpu.num_evicted_blocks, num_unused, self.num_written_blocks
        num_next = min(_MAX_AHEAD, max(pool.num_blocks // 4, 1)) - num_unused
        if num_next <= 0 or state == self._scanned or step < self._paused_step:
            return []
        num_most = min(_MAX_WRITING - self._num_writing, num_next, self.pool.num_free)
        chosen: list[tuple[int, BlockKey]] = []
        for block in islice(pool.idle_blocks, num_next):
            key = self._cpu.key_of(block)
            if key is not None and not self.has_key(key):
                chosen.append((block, key))
        self._scanned = state if len(chosen) <= num_most else None
        writes = []
        for block, key in chosen[: max(num_most, 0)]:
            pool.pin_cached(block)
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
                self._cpu.fail_copy(target)
            else:
                self.num_read_blocks += 1
                self.pool.unpin(source)
                self._cpu.end_copy(target)

    def _end_writes(self, copies: list[BlockCopy], failed: set[int]) -> None:
        self._num_writing -= len(copies)
        for target in (copy.target for copy in copies):
            if target in failed:
                self.num_failed_writes += 1
                self.fail_copy(target)
            else:
                self.num_written_blocks += 1
                self.end_copy(target)
        pool = self._cpu.pool
        for source in (copy.source for copy in reversed(copies)):
            pool.unpin(source)
            # The block was the least recently used before it was written.
            pool.age(source)
