"""Checksums of the blocks of a CPU pool, which outlive the rank with the pool.

They reveal a block that was half written when the rank died, or damaged by the fault.
"""

from __future__ import annotations

import logging
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["BYTES_PER_BLOCK", "BlockChecksums"]

logger = logging.getLogger(__name__)

BYTES_PER_BLOCK = 8
_IS_KNOWN = 1 << 32
"""Added to a checksum, so that zero means that there is none."""


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
