"""The KV cache of one rank: a device pool and a CPU pool of equal layout.

Both are block-major, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`,
so that a block of all layers is one contiguous chunk and a swap is one copy a block.
Which block belongs to whom is the scheduler's matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attention.abstract import AttentionBackend
    from pagedray.batch import BlockCopy
    from pagedray.config import ModelConfig

__all__ = ["KVCache", "block_bytes"]


def block_bytes(
    model: ModelConfig, *, num_kv_heads: int, block_size: int, dtype: torch.dtype
) -> int:
    """Return the bytes of one block of all layers on a rank that holds `num_kv_heads`."""
    return 2 * model.num_layers * block_size * num_kv_heads * model.head_size * dtype.itemsize


class KVCache:
    """The pools of one rank and the copies between them."""

    def __init__(
        self,
        model: ModelConfig,
        backend: type[AttentionBackend],
        *,
        num_blocks: int,
        num_cpu_blocks: int,
        num_kv_heads: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def pool(size: int, *, is_pinned: bool, where: torch.device) -> torch.Tensor:
            # Zeros, not whatever memory held: a masked score still multiplies what it masks.
            return torch.zeros(
                backend.get_kv_cache_shape(
                    num_blocks=size,
                    num_layers=model.num_layers,
                    block_size=block_size,
                    num_kv_heads=num_kv_heads,
                    head_size=model.head_size,
                ),
                dtype=dtype,
                device=where,
                pin_memory=is_pinned,
            )

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

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy device blocks to device blocks."""
        if copies:
            self._backend.copy_blocks(self.device_pool, _pairs(copies))


def _pairs(copies: list[BlockCopy]) -> list[tuple[int, int]]:
    # Sorted, neighbouring blocks go in one copy.
    return sorted((copy.source, copy.target) for copy in copies)
