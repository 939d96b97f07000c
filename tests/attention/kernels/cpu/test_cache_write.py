"""Keys and values that the kernel writes, against an index assignment by torch."""

import pytest
import torch

from attention.kernels.cpu.cache_write import CacheWrite


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_rows_go_to_their_slots_and_nowhere_else(num_tokens: int, dtype: torch.dtype) -> None:
    write = CacheWrite.make()
    if write is None:
        pytest.skip("needs a C compiler")
    # Columns of one matrix, as a model has them, with two rows of padding.
    columns = torch.randint(0, 100, (num_tokens + 2, 56)).to(dtype)
    key, value = columns[:, 8:32], columns[:, 32:]
    slots = torch.randperm(240)[:num_tokens]
    cached = torch.full((2, 240, 24), 111).to(dtype)
    expected = cached.clone()
    expected[0, slots], expected[1, slots] = key[:num_tokens], value[:num_tokens]
    write(key, value, slots, cached[0], cached[1])
    assert torch.equal(cached, expected)
