"""Copies of blocks by a list on the device, against indexing in torch."""

import pytest
import torch

from attention.kernels.triton.copy_blocks import copy_blocks
from tests.attention.kernels.kernel_device import DEVICE


@pytest.mark.parametrize("head_size", [1, 2, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_destinations_equal_their_sources_and_all_else_stays(
    dtype: torch.dtype, head_size: int
) -> None:
    shape = 9, 3, 2, 4, 1, head_size
    cache = torch.randint(0, 256, shape).to(dtype).to(DEVICE)
    expected = cache.clone()
    expected[[0, 8, 5]] = cache[[3, 3, 7]]
    copy_blocks(cache, torch.tensor([[3, 0], [3, 8], [7, 5]], device=DEVICE))
    assert torch.equal(cache, expected)


def test_fp8_content_is_copied_bit_by_bit() -> None:
    cache = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 1, 2, 4, 2, 8)
    expected = cache[0].clone()
    copy_blocks(cache.view(torch.float8_e4m3fn), torch.tensor([[0, 1]], device=DEVICE))
    assert torch.equal(cache[1], expected)


def test_empty_list_copies_nothing() -> None:
    cache = torch.zeros(2, 1, 2, 4, 2, 8, device=DEVICE)
    copy_blocks(cache, torch.zeros(0, 2, dtype=torch.int64, device=DEVICE))
    assert not cache.any()
