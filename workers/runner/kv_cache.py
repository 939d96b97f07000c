"""The KV cache of one rank: a device pool and a CPU pool of equal layout.

Both are block-major, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`, so that a
block of all layers is contiguous and a swap is one copy per block. The scheduler assigns blocks.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from attention.cache import kv_cache_shape
from attention.params import storage_dtype
from workers.runner.batched_copies import find_batched_copies
from workers.runner.host_pool import CudaPinner, HostPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from attention.abstract import AttentionBackend, AttentionSpec
    from pagedray.batch import BlockCopy
    from workers.runner.batched_copies import BatchedCopies
    from workers.runner.persistent_pool import PoolMapper

__all__ = ["KVCache", "PoolCopier", "block_bytes", "make_host_pool", "num_staging_blocks"]

logger = logging.getLogger(__name__)

_MAX_STAGING_BYTES = 2**30
_MAX_STAGING_PART = 32
"""Staging blocks are at most 1 / `_MAX_STAGING_PART` of the device pool."""


def block_bytes(spec: AttentionSpec) -> int:
    """Return the bytes of one block of all layers on one rank."""
    shape = _block_shape(spec)
    return math.prod(shape) * spec.cache_dtype.itemsize


def num_staging_blocks(spec: AttentionSpec, num_blocks: int) -> int:
    """Return the number of staging blocks, for evicted content, of a pool of `num_blocks`."""
    if spec.device.type == "cpu":
        return 0
    return min(num_blocks // _MAX_STAGING_PART, _MAX_STAGING_BYTES // block_bytes(spec))


def make_host_pool(
    spec: AttentionSpec,
    num_blocks: int,
    former: HostPool | None = None,
    *,
    mapper: PoolMapper | None = None,
    note_unpinned: Callable[[int], None] = lambda num_blocks: None,
) -> HostPool:
    """Return the former CPU pool if its size fits, or else a new pool.

    A new pool is in memory of the `mapper`, if it has any, and calls `note_unpinned` with the
    number of blocks that a GPU cannot pin. Raises OSError if the host does not have the memory.
    """
    layout = num_blocks, _block_shape(spec), storage_dtype(spec.cache_dtype)
    if former is not None and former.has_layout(*layout):
        return former
    pinner = CudaPinner(spec.device) if spec.device.type == "cuda" else None
    mapped = mapper.map_pool(*layout) if mapper is not None and num_blocks else None
    return HostPool(*layout, pinner=pinner, mapped=mapped, note_unpinned=note_unpinned)


class KVCache:
    """The pools of one rank and the copies between them."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        spec: AttentionSpec,
        *,
        num_blocks: int,
        host_pool: HostPool,
        num_staging: int = 0,
    ) -> None:
        """`num_staging` blocks follow the device pool."""
        shape = num_blocks + num_staging, *_block_shape(spec)
        dtype = storage_dtype(spec.cache_dtype)
        self._backend = backend
        # Zeros, since masked scores still multiply values: NaN in unused slots would spread.
        if spec.device.type == "cpu":
            self._device_blocks = _untouched_zeros(shape, dtype)
        else:
            self._device_blocks = torch.zeros(shape, dtype=dtype, device=spec.device)
        self.device_pool = self._device_blocks[:num_blocks]
        self.host_pool = host_pool
        batched = find_batched_copies() if spec.device.type == "cuda" else None
        self._copier = PoolCopier(backend, self._device_blocks, host_pool, batched=batched)

    @property
    def num_staging(self) -> int:
        """Device blocks behind the pool."""
        return len(self._device_blocks) - len(self.device_pool)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy device blocks, staging blocks included, to CPU blocks, on the current stream."""
        self._copier.copy_out(copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy CPU blocks to device blocks, on the current stream."""
        self._copier.copy_in(copies)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks within the device, staging blocks included."""
        if copies:
            # Sorted, so that adjacent blocks become one copy.
            pairs = sorted((copy.source, copy.target) for copy in copies)
            self._backend.copy_blocks(self._device_blocks, pairs)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory before they are written; torch would write them."""
    # Integers of the same size, since NumPy lacks some of torch's types.
    return torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}")).view(dtype)


def _block_shape(spec: AttentionSpec) -> tuple[int, ...]:
    layer = spec.layers[0]
    return kv_cache_shape(
        num_blocks=1,
        num_layers=spec.num_cache_layers,
        block_size=spec.block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
    )[1:]


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
