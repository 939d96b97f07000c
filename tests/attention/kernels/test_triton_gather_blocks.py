"""Gathers from the cache, against indexing in torch."""

import pytest
import torch

from attention.kernels.triton.gather_blocks import gather_blocks
from tests.attention.kernels.features import Shape
from tests.attention.kernels.kernel_device import DEVICE
from tests.attention.kernels.paged_case import PagedCase


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rows_are_the_keys_and_values_from_the_starts(
    cache_dtype: torch.dtype | None, dtype: torch.dtype, block_size: int
) -> None:
    k_scale, v_scale = (1.0, 1.0) if cache_dtype is None else (0.5, 4.0)
    shape = Shape(
        num_kv_heads=3,
        head_size=24,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    case = PagedCase(shape, [37, 5, 70, 9])
    starts, counts = [30, 0, 3, 9], [7, 5, 67, 0]
    key, value = torch.full((2, 81, 3, 24), 7.0, dtype=dtype, device=DEVICE)
    gather_blocks(
        case.cache[:, 1],
        block_tables=case.tables.to(DEVICE),
        starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        cu_lens=torch.tensor([0, 7, 12, 79, 79], dtype=torch.int32, device=DEVICE),
        max_len=67,
        key=key,
        value=value,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    contents = [
        case.keys_and_values(i)[:, start : start + count]
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    expected = torch.cat(contents, dim=1).to(dtype)
    assert torch.equal(torch.stack([key, value]).cpu()[:, :79], expected)
    assert (key[79:] == 7.0).all()
    assert (value[79:] == 7.0).all()
