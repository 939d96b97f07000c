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

if TYPE_CHECKING:
    from attention.abstract import AttentionBackend, AttentionSpec
    from pagedray.batch import BlockCopy

__all__ = ["KVCache", "block_bytes"]


def block_bytes(spec: AttentionSpec) -> int:
    """Return the bytes of one block of all layers on one rank."""
    shape = _block_shape(spec)
    return math.prod(shape) * spec.cache_dtype.itemsize


class KVCache:
    """The pools of one rank and the copies between them."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        spec: AttentionSpec,
        *,
        num_blocks: int,
        num_cpu_blocks: int,
    ) -> None:
        def pool(size: int, *, is_pinned: bool, where: torch.device) -> torch.Tensor:
            # Zeros, since masked scores still multiply values: NaN in unused slots would spread.
            shape, dtype = (size, *_block_shape(spec)), storage_dtype(spec.cache_dtype)
            if where.type == "cpu" and not is_pinned:
                return _untouched_zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=where, pin_memory=is_pinned)

        device = spec.device
        self._backend = backend
        self.device_pool = pool(num_blocks, is_pinned=False, where=device)
        self.cpu_pool = pool(
            num_cpu_blocks,
            is_pinned=device.type == "cuda" and num_cpu_blocks > 0,
            where=torch.device("cpu"),
        )

    def swap_out(self, copies: list[BlockCopy]) -> None:
        """Copy device blocks to CPU blocks."""
        if copies:
            self._backend.swap_blocks(self.device_pool, self.cpu_pool, _pairs(copies))

    def swap_in(self, copies: list[BlockCopy]) -> None:
        """Copy CPU blocks to device blocks."""
        if copies:
            self._backend.swap_blocks(self.cpu_pool, self.device_pool, _pairs(copies))

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Copy blocks within the device pool."""
        if copies:
            self._backend.copy_blocks(self.device_pool, _pairs(copies))


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


def _pairs(copies: list[BlockCopy]) -> list[tuple[int, int]]:
    # Sorted, so that adjacent blocks become one copy.
    return sorted((copy.source, copy.target) for copy in copies)
