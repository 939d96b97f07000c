"""The CPU pool's memory, which is pinned after the start, part by part.

Until a block is pinned, copies of it are slower and keep the host waiting, with the same result.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from pagedray.rank_progress import PoolReport
from workers.runner.kept_pool.block_checksums import BlockChecksums
from workers.runner.pinned_chunks import PinnedChunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.runner.kept_pool.mapped_pool import MappedPool
    from workers.runner.pinned_chunks import Pinner

__all__ = ["HostPool"]

_CHUNK_BYTES = 64 * 2**20
"""Bytes that are pinned by one call, during which other CUDA calls may wait."""


class HostPool:
    """Blocks in host memory, `[num_blocks, *block_shape]`; zeros unless it has a former content."""

    def __init__(
        self,
        num_blocks: int,
        block_shape: Sequence[int],
        dtype: torch.dtype,
        *,
        pinner: Pinner | None,
        mapped: MappedPool | None = None,
        note_unpinned: Callable[[int], None] = lambda num_blocks: None,
    ) -> None:
        """Without a `pinner`, no block is pinned. The memory is `mapped`, or private without it.

        `note_unpinned` is called with the number of blocks that a `pinner` cannot pin.
        Raises OSError if the host does not have the memory.
        """
        self.mapped = mapped
        self._has_reported = False
        self._shape, self._dtype = tuple(block_shape), dtype
        block_bytes = math.prod(block_shape) * dtype.itemsize
        page = mmap.PAGESIZE
        # Pages cannot be pinned twice, so chunks end at pages, and blocks must not span chunks.
        blocks_per_page_end = page // math.gcd(page, block_bytes)
        num_units = max(_CHUNK_BYTES // (blocks_per_page_end * block_bytes), 1)
        self.blocks_per_chunk = num_units * blocks_per_page_end
        """No copy may span two chunks of this many blocks."""
        is_pinned = pinner is not None and num_blocks > 0
        self.checksums: BlockChecksums | None = None
        """None if blocks are not checked when the pool outlives a rank."""
        memory = None if mapped is None else mapped.memory
        self.blocks = _blocks(num_blocks, self._shape, dtype, memory, is_pinned=is_pinned)
        if mapped is not None and len(mapped.extra):
            self.checksums = BlockChecksums(self.blocks, mapped.extra)
        self._chunks: PinnedChunks | None = None
        if pinner is not None and num_blocks:
            chunks = self._chunks = PinnedChunks(
                pinner,
                address=self.blocks.data_ptr(),
                num_blocks=num_blocks,
                block_bytes=block_bytes,
                blocks_per_chunk=self.blocks_per_chunk,
                note_unpinned=note_unpinned,
            )
            # Chunks must be unpinned before the memory is freed. At exit, the process ends both.
            weakref.finalize(self, chunks.release).atexit = False
        self._thread: threading.Thread | None = None

    def pin_next(self) -> bool:
        """Pin some of the blocks; return False if none are left, or if a thread pins them.

        Call it while no step runs: steps would be slower meanwhile.
        """
        if self._chunks is None or self._thread is not None:
            return False
        # CUDA keeps the error of a failed call for the thread that made it, and torch would raise
        # it at the next kernel of that thread, so the step thread must not pin.
        with ThreadPoolExecutor(1, thread_name_prefix="pagedray-pin") as pinning:
            return pinning.submit(self._chunks.pin_next).result()

    def start_pinning(self) -> None:
        """Begin to pin the blocks that are left in the background, unless that has begun.

        Call it when graphs are captured: both would wait for each other in the kernel.
        """
        if self._chunks is not None and self._thread is None:
            self._thread = threading.Thread(
                target=self._chunks.pin_all, name="pagedray-pin", daemon=True
            )
            self._thread.start()

    def take_report(self) -> PoolReport:
        """Return whether it has the content that the last epoch left; call it once an epoch."""
        is_first, self._has_reported = not self._has_reported, True
        is_shared = self.mapped is not None
        if not is_first:
            return PoolReport(is_shared=is_shared, is_kept=True)
        if self.mapped is None or not self.mapped.is_former:
            return PoolReport(is_shared=is_shared)
        damaged = () if self.checksums is None else self.checksums.damaged_blocks()
        return PoolReport(is_shared=True, is_kept=True, damaged=damaged)

    @property
    def num_pinned_blocks(self) -> int:
        """The number of pinned blocks, from the first block on; 0 without a GPU."""
        return 0 if self._chunks is None else self._chunks.num_pinned_blocks

    def wait_until_pinned(self) -> None:
        """Wait for the end of `start_pinning`; blocks are pinned as far as possible."""
        if self._thread is not None:
            self._thread.join()

    def has_layout(self, num_blocks: int, block_shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether the pool has `num_blocks` blocks of this shape."""
        wanted = num_blocks, tuple(block_shape), dtype
        return (len(self.blocks), self._shape, self._dtype) == wanted


def _blocks(
    num_blocks: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    memory: mmap.mmap | None,
    *,
    is_pinned: bool,
) -> torch.Tensor:
    """Return blocks at the start of `memory`, or zeros that take no memory before writes."""
    num_bytes = num_blocks * math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros((num_blocks, *shape), dtype=dtype)
    if memory is None:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if is_pinned:
        # A write to pages that a child process shares would copy them; the GPU would keep the old.
        memory.madvise(mmap.MADV_DONTFORK)
        # Large pages are pinned faster, but the kernel may not support them.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the memory.
    content = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
    return content.view(dtype).view(num_blocks, *shape)
