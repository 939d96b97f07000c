"""The CPU pool's memory, which is pinned after the start, part by part.

Until a block is pinned, copies of it are slower and keep the host waiting, with the same result.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import torch

from pagedray.rank_progress import PoolReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.runner.persistent_pool import MappedPool

__all__ = ["CudaPinner", "HostPool"]

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 2**20
"""Bytes that are pinned by one call, during which other CUDA calls may wait."""

_MADV_POPULATE_WRITE = 23
"""Advice of madvise(2) since Linux 5.14, which `mmap` does not define."""
_POPULATED_BYTES = 4 * 2**20
"""Bytes for which pages are allocated by one call, during which mappings of a step wait."""


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
        memory = None if mapped is None else mapped.memory
        self.blocks = _blocks(num_blocks, self._shape, dtype, memory, is_pinned=is_pinned)
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
        is_kept = not is_first or (self.mapped is not None and self.mapped.is_former)
        return PoolReport(is_shared=self.mapped is not None, is_kept=is_kept)

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


class Pinner(Protocol):
    """Pins memory, and returns 0 or the code of an error."""

    def pin(self, address: int, num_bytes: int) -> int:
        """Pin pages that are not pinned."""

    def unpin(self, address: int) -> int:
        """Undo `pin` at an address."""


class CudaPinner:
    """Pins memory for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, num_bytes: int) -> int:
        _populate(address, num_bytes)
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0).value)

    def unpin(self, address: int) -> int:
        return int(torch.cuda.cudart().cudaHostUnregister(address).value)


class PinnedChunks:
    """The chunks of a pool, pinned from the first chunk on."""

    def __init__(
        self,
        pinner: Pinner,
        *,
        address: int,
        num_blocks: int,
        block_bytes: int,
        blocks_per_chunk: int,
        note_unpinned: Callable[[int], None],
    ) -> None:
        """`note_unpinned` is called with the number of blocks that cannot be pinned, if any."""
        self._note_unpinned = note_unpinned
        self._pinner = pinner
        self._num_blocks = num_blocks
        self._chunks: list[tuple[int, int, int]] = []
        """Address, bytes, and the blocks before the end of each chunk."""
        for first in range(0, num_blocks, blocks_per_chunk):
            end = min(first + blocks_per_chunk, num_blocks)
            self._chunks.append((address + first * block_bytes, (end - first) * block_bytes, end))
        # The garbage collector may release the chunks on the thread that pins them.
        self._lock = threading.RLock()
        self._num_pinned_chunks = 0
        self._pinning_s = 0.0
        self._has_failed = self._is_released = False
        self.num_pinned_blocks = 0

    def pin_next(self) -> bool:
        """Pin the next chunk; return False if none is left. If it fails, the rest stays as it is.

        One thread at a time may do so.
        """
        with self._lock:
            is_over = self._has_failed or self._is_released
            if is_over or self._num_pinned_chunks == len(self._chunks):
                return False
            address, num_bytes, end = self._chunks[self._num_pinned_chunks]
            started_s = time.perf_counter()
            error = self._pinner.pin(address, num_bytes)
            self._pinning_s += time.perf_counter() - started_s
            if self._is_released:
                self._pinner.unpin(address)
            elif error:
                self._has_failed = True
                self._report_failure(error)
            else:
                self._num_pinned_chunks += 1
                self.num_pinned_blocks = end
                if self._num_pinned_chunks == len(self._chunks):
                    self._report_end()
        return True

    def pin_all(self) -> None:
        """Pin the chunks that are left."""
        while self.pin_next():
            pass

    def release(self) -> None:
        """Unpin all chunks, and pin no more; no copy of them may be under way."""
        with self._lock:
            self._is_released = True
            self.num_pinned_blocks = 0
            for address, _, _ in self._chunks[: self._num_pinned_chunks]:
                self._pinner.unpin(address)
            self._num_pinned_chunks = 0

    def _report_failure(self, error: int) -> None:
        logger.warning(
            "Only %s of %s blocks of the CPU pool are pinned, and copies of the others are slower: "
            "CUDA returned error %s.",
            self.num_pinned_blocks,
            self._num_blocks,
            error,
        )
        self._note_unpinned(self._num_blocks - self.num_pinned_blocks)

    def _report_end(self) -> None:
        num_bytes = sum(size for _, size, _ in self._chunks)
        logger.info(
            "Pinned %.1f GiB of host memory for the CPU pool in %.1f s.",
            num_bytes / 2**30,
            self._pinning_s,
        )


def _populate(address: int, num_bytes: int) -> None:
    """Have the kernel allocate pages if it can, so that pinning blocks other CUDA calls less."""
    # After an error, pages are allocated while they are pinned.
    madvise = ctypes.CDLL(None).madvise
    for first in range(0, num_bytes, _POPULATED_BYTES):
        madvise(
            ctypes.c_void_p(address + first),
            ctypes.c_size_t(min(_POPULATED_BYTES, num_bytes - first)),
            ctypes.c_int(_MADV_POPULATE_WRITE),
        )
