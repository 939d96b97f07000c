"""Writes into the cache, against indexing in torch."""

import pytest
import torch

from attention.kernels.triton.cache_write import cache_write
from tests.attention.kernels.kernel_device import DEVICE

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SLOTS = [5, -1, 16, 2, 63, -1, 40]


def write(
    key: torch.Tensor, value: torch.Tensor, cache_dtype: torch.dtype, *, scales: tuple[float, float]
) -> torch.Tensor:
    """Return both layers of a cache that was NaN before, `[4, 2, 2, 16, 3, 24]`."""
    cache = torch.full((4, 2, 2, 16, 3, 24), torch.nan).to(cache_dtype).to(DEVICE)
    slots = torch.tensor(SLOTS, device=DEVICE)
    k_scale, v_scale = scales
    cache_write(key, value, cache[:, 1], slots, k_scale=k_scale, v_scale=v_scale)
    return cache


def rows_of(cache: torch.Tensor, side: int) -> torch.Tensor:
    """Return the slots of the second layer, float32 `[64, 72]`."""
    return cache[:, 1, side].float().reshape(64, 72)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tokens_are_at_their_slots_and_nothing_else_is_written(dtype: torch.dtype) -> None:
    # One row of each token holds query, key and value; one more token is padding.
    tokens = torch.randn(len(SLOTS) + 1, 3 * 72).to(dtype).to(DEVICE)
    cache = write(tokens[:, 72:144], tokens[:, 144:], dtype, scales=(1.0, 1.0))
    assert cache[:, 0].isnan().all()
    for side in range(2):
        expected = torch.full((64, 72), torch.nan, device=DEVICE)
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                expected[slot] = tokens[token, 72 * (side + 1) :][:72].float()
        torch.testing.assert_close(rows_of(cache, side), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fp8_cache_holds_the_quotient(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    # Quotients that need no rounding, because Triton's interpreter does not round to nearest.
    quotients = torch.tensor([0.5, -1.0, 1.5, -3.0, 0.0, 6.0])[torch.randint(6, (2, 7, 72))]
    key = (quotients[0] * 0.375).to(dtype).to(DEVICE)
    value = (quotients[1] * 8.0).to(dtype).to(DEVICE)
    cache = write(key, value, cache_dtype, scales=(0.375, 8.0))
    for side in range(2):
        actual = rows_of(cache, side).cpu()
        for token in (0, 2, 3, 4, 6):
            assert torch.equal(actual[SLOTS[token]], quotients[side, token])


@pytest.mark.parametrize(("cache_dtype", "largest"), [(FP8[0], 448.0), (FP8[1], 57344.0)])
def test_too_large_numbers_become_the_largest(cache_dtype: torch.dtype, largest: float) -> None:
    key = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 2 * largest, 1.01 * largest])
    key = key.repeat(len(SLOTS), 12).to(DEVICE)
    cache = write(key, key, cache_dtype, scales=(1.0, 0.5))
    expected = largest * key[0].sign()
    assert torch.equal(rows_of(cache, 0)[SLOTS[0]], expected)
    assert torch.equal(rows_of(cache, 1)[SLOTS[0]], expected)
