"""Copies blocks between the pools on the current stream."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from attention.abstract import AttentionBackend
    from pagedray.batch import BlockCopy
    from workers.runner.batched_copies import BatchedCopies
    from workers.runner.host_pool import HostPool

__all__ = ["PoolCopier"]

logger = logging.getLogger(__name__)


class PoolCopier:
    """Copies many blocks by one call if the driver can, or by one for each run of blocks."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        device_blocks: torch.Tensor,
        host_pool: HostPool,
        *,
        batched: BatchedCopies | None,
    ) -> None:
        """Without `batched`, there is one call for each run of blocks."""
        self._backend = backend
        self._device_blocks = device_blocks
        self._host_pool = host_pool
        self._batched = batched

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy device blocks to CPU blocks."""
        self._copy(self._device_blocks, self._host_pool.blocks, copies, host_column=1)

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy CPU blocks to device blocks."""
        self._copy(self._host_pool.blocks, self._device_blocks, copies, host_column=0)

    def _copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        copies: Sequence[BlockCopy],
        *,
        host_column: int,
    ) -> None:
        if not copies:
            return
        pairs = np.array([(copy.source, copy.target) for copy in copies], dtype=np.int64)
        # Adjacent blocks become one copy.
        pairs = pairs[np.argsort(pairs[:, host_column])]
        if self._batched is not None:
            num_pinned = np.searchsorted(pairs[:, host_column], self._host_pool.num_pinned_blocks)
            if self._try_batch(source, target, pairs[:num_pinned], host_column=host_column):
                pairs = pairs[num_pinned:]
        chunks = pairs[:, host_column] // self._host_pool.blocks_per_chunk
        for part in np.split(pairs, np.flatnonzero(np.diff(chunks)) + 1):
            self._backend.swap_blocks(source, target, part.tolist())

    def _try_batch(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        pairs: npt.NDArray[np.int64],
        *,
        host_column: int,
    ) -> bool:
        """Copy pairs in one call, or return False if the driver cannot."""
        assert self._batched is not None
        if not len(pairs):
            return True
        assert pairs.min() >= 0
        assert pairs[:, 0].max() < len(source)
        assert pairs[:, 1].max() < len(target)
        chunks = pairs[:, host_column] // self._host_pool.blocks_per_chunk
        firsts, lengths = _runs(pairs, chunks)
        block_bytes = source[0].numel() * source.element_size()
        try:
            self._batched.launch(
                sources=np.uint64(source.data_ptr())
                + firsts[:, 0].astype(np.uint64) * np.uint64(block_bytes),
                targets=np.uint64(target.data_ptr())
                + firsts[:, 1].astype(np.uint64) * np.uint64(block_bytes),
                sizes=lengths.astype(np.uint64) * np.uint64(block_bytes),
            )
        except RuntimeError as error:
            logger.warning("Blocks are copied one by one, since the driver failed: %s.", error)
            self._batched = None
            return False
        return True


def _runs(
    pairs: npt.NDArray[np.int64], chunks: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first pair of each run of adjacent pairs in a chunk, and the runs' lengths."""
    is_adjacent = (np.diff(pairs, axis=0) == 1).all(axis=1) & (np.diff(chunks) == 0)
    starts = np.concatenate(([0], np.flatnonzero(~is_adjacent) + 1))
    return pairs[starts], np.diff(np.append(starts, len(pairs)))
