"""The CPU pool's memory, which is pinned in the background so that it delays no start.

CUDA pins memory at a few GiB per second, since the kernel must provide every page. Until a block is
pinned, copies of it are slower and keep the host waiting, but give the same result.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HostPool"]

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 2**20
"""Memory that is pinned at once; other calls of CUDA may wait for that long."""
_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; `mmap` does not define it."""


class HostPool:
    """Blocks of zeros in host memory, `[num_blocks, *block_shape]`."""

    def __init__(
        self,
        num_blocks: int,
        block_shape: Sequence[int],
        dtype: torch.dtype,
        *,
        device: torch.device,
    ) -> None:
        """`device` is the one that blocks are copied to and from.

        Raises OSError if the host does not have the memory.
        """
        self._shape, self._dtype = tuple(block_shape), dtype
        block_bytes = math.prod(block_shape) * dtype.itemsize
        page = mmap.PAGESIZE
        # Pages cannot be pinned twice, so chunks end at pages, and blocks must not span chunks.
        blocks_per_page_end = page // math.gcd(page, block_bytes)
        num_units = max(_CHUNK_BYTES // (blocks_per_page_end * block_bytes), 1)
        self.blocks_per_chunk = num_units * blocks_per_page_end
        """No copy may span two chunks of so many blocks."""
        is_pinned = device.type == "cuda" and num_blocks > 0
        self.blocks = _zeros(num_blocks, self._shape, dtype, has_large_pages=is_pinned)
        self._pins = _Pins(
            self.blocks.data_ptr(), num_blocks, block_bytes, self.blocks_per_chunk, device
        )
        self._thread: threading.Thread | None = None
        if is_pinned:
            # They must be gone before the memory is; at exit, the process's end takes care of both.
            weakref.finalize(self, self._pins.release).atexit = False
            self._thread = threading.Thread(
                target=self._pins.pin_all, name="pagedray-pin", daemon=True
            )
            self._thread.start()

    @property
    def num_pinned_blocks(self) -> int:
        """The blocks that are pinned, from the first one on; 0 without a GPU."""
        return self._pins.num_pinned_blocks

    def wait_until_pinned(self) -> None:
        """Wait until blocks are pinned, as far as they can be."""
        if self._thread is not None:
            self._thread.join()

    def has_layout(self, num_blocks: int, block_shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether this pool has so many blocks of this shape."""
        wanted = num_blocks, tuple(block_shape), dtype
        return (len(self.blocks), self._shape, self._dtype) == wanted


class _Pins:
    """The part of a pool that is pinned."""

    def __init__(
        self,
        address: int,
        num_blocks: int,
        block_bytes: int,
        blocks_per_chunk: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._num_blocks = num_blocks
        self._chunks: list[tuple[int, int, int]] = []
        """Address, bytes, and the blocks before the end of each chunk."""
        for first in range(0, num_blocks, blocks_per_chunk):
            end = min(first + blocks_per_chunk, num_blocks)
            self._chunks.append((address + first * block_bytes, (end - first) * block_bytes, end))
        self._lock = threading.Lock()
        self._num_pinned_chunks = 0
        self._is_released = False
        self.num_pinned_blocks = 0

    def pin_all(self) -> None:
        """Pin chunk after chunk; one that fails leaves the rest as it is."""
        started_s = time.perf_counter()
        torch.cuda.set_device(self._device)
        for address, size, end in self._chunks:
            _populate(address, size)
            with self._lock:
                if self._is_released:
                    return
                result = int(torch.cuda.cudart().cudaHostRegister(address, size, 0).value)
                if result:
                    logger.warning(
                        "Only %s of %s blocks of the CPU pool are pinned, and copies of the "
                        "others are slower: cudaHostRegister returned %s.",
                        self.num_pinned_blocks,
                        self._num_blocks,
                        result,
                    )
                    return
                self._num_pinned_chunks += 1
                self.num_pinned_blocks = end
        num_bytes = sum(size for _, size, _ in self._chunks)
        logger.info(
            "Pinned %.1f GiB of host memory for the CPU pool in %.1f s.",
            num_bytes / 2**30,
            time.perf_counter() - started_s,
        )

    def release(self) -> None:
        """Unpin all chunks; no copy of them may be under way."""
        with self._lock:
            self._is_released = True
            self.num_pinned_blocks = 0
            for address, _, _ in self._chunks[: self._num_pinned_chunks]:
                torch.cuda.cudart().cudaHostUnregister(address)
            self._num_pinned_chunks = 0


def _zeros(
    num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype, *, has_large_pages: bool
) -> torch.Tensor:
    """Return zeros that take no memory before they are written."""
    num_bytes = num_blocks * math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros((num_blocks, *shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if has_large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer pages are pinned faster.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the memory.
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(num_blocks, *shape)


def _populate(address: int, size: int) -> None:
    """Have the kernel provide pages, which keeps no other call of CUDA waiting, if it can."""
    # An error means that they are provided while they are pinned.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_WRITE)
    )
