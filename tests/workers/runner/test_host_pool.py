"""The CPU pool's memory."""

from __future__ import annotations

import mmap

import pytest
import torch

from workers.runner.host_pool import HostPool

CPU = torch.device("cpu")


@pytest.mark.parametrize("block_shape", [(3,), (2, 7, 5), (64, 1024), (2**24,), (2**25 + 1,)])
def test_chunks_end_at_pages_and_between_blocks(block_shape: tuple[int, ...]) -> None:
    pool = HostPool(2, block_shape, torch.float16, device=CPU)
    chunk_bytes = pool.blocks_per_chunk * pool.blocks[0].nbytes
    assert chunk_bytes % mmap.PAGESIZE == 0
    assert pool.blocks.data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_a_pool_has_zeros_and_nothing_pinned_without_a_gpu(dtype: torch.dtype) -> None:
    pool = HostPool(5, (2, 3), dtype, device=CPU)
    assert torch.equal(pool.blocks, torch.zeros(5, 2, 3, dtype=dtype))
    assert pool.num_pinned_blocks == 0
    assert pool.has_layout(5, [2, 3], dtype)
    assert not pool.has_layout(6, [2, 3], dtype)


def test_a_pool_may_be_empty() -> None:
    assert HostPool(0, (2, 3), torch.float32, device=CPU).blocks.shape == (0, 2, 3)
