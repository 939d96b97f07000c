"""The KV cache of one rank: a device pool and a CPU pool of equal layout.

Both are block-major, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`, so that a
block of all layers is contiguous and a swap is one copy per block. The scheduler assigns blocks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from attention.cache import kv_cache_shape
from attention.params import storage_dtype
from workers.runner.batched_copies import find_batched_copies
from workers.runner.host_pool import HostPool
from workers.runner.pinned_chunks import CudaPinner
from workers.runner.pool_copier import PoolCopier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attention.abstract import AttentionBackend, AttentionSpec
    from pagedray.batch import BlockCopy
    from workers.runner.kept_pool.pool_mapper import PoolMapper

__all__ = ["KVCache", "block_bytes", "make_host_pool", "num_staging_blocks"]

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
