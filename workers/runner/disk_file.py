"""The file without a name in which one rank keeps KV blocks.

Other users cannot open such a file, and it is deleted when the process ends, however it ends. The
checksums of blocks are only in memory: reading a block that has changed is an error.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from workers.runner.kept_pool.block_checksums import BlockChecksums

__all__ = ["DiskFile"]


class DiskFile:
    """Writes blocks of a pool to a file, and reads them back. Thread-safe for different blocks."""

    def __init__(
        self, folder: str, blocks: torch.Tensor, checksums: BlockChecksums | None = None
    ) -> None:
        """`blocks` are those of the CPU pool, some of which have `checksums` there.

        Raises OSError if the folder takes no file.
        """
        self._pool_checksums = checksums
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
            if self._pool_checksums is not None:
                self._pool_checksums.note_block(cpu_block)

    def close(self) -> None:
        """Change no CPU block anymore; the file is gone once no call uses it."""
        with self._lock:
            self._is_closed = True
