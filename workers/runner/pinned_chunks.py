"""Host memory that a GPU reads and writes while the host computes, pinned part by part.

CUDA pins memory at a few GiB per second, since the kernel must provide every page.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CudaPinner", "PinnedChunks", "Pinner"]

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23
"""Advice of madvise(2) since Linux 5.14, which `mmap` does not define."""

_POPULATED_BYTES = 4 * 2**20
"""Bytes for which pages are allocated by one call, during which mappings of a step wait."""


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
