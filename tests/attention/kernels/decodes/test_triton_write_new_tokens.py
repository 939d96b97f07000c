"""New tokens that another kernel than that of the decodes rotates and writes."""

import pytest
import torch

from tests.attention.kernels.features import HEADS, Shape
from tests.attention.kernels.kernel_device import ROTATED_DTYPES, or_slow
from tests.attention.kernels.paged_case import PagedCase


def check(shape: Shape, seq_lens: list[int], unwritten: int | None = None) -> None:
    """Check new tokens against the reference, and that the decode alone has the same bits."""
    one, two = PagedCase(shape, seq_lens), PagedCase(shape, seq_lens)
    torch.manual_seed(1)
    alone = one.check_new_tokens({}, num_splits=2, unwritten=unwritten)
    torch.manual_seed(1)
    after = two.check_new_tokens({}, num_splits=2, unwritten=unwritten, by_two_kernels=True)
    torch.testing.assert_close(after, alone, rtol=0, atol=0)
    torch.testing.assert_close(two.cache, one.cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_size", [16, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), or_slow(HEADS, slow=HEADS[3:5]))
def test_new_tokens_are_rotated_and_written(
    num_heads: int, num_kv_heads: int, head_size: int
) -> None:
    check(Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size), [65, 1, 0, 9])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(40, 5), (48, 48), (64, 1)])
def test_heads_are_divided_among_programs(num_heads: int, num_kv_heads: int) -> None:
    check(Shape(num_heads=num_heads, num_kv_heads=num_kv_heads), [20, 3])


@pytest.mark.parametrize("dtype", ROTATED_DTYPES, ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    check(Shape(num_heads=32, num_kv_heads=8, head_size=128, dtype=dtype), [90, 18, 64])


def test_a_token_without_a_slot_is_not_written() -> None:
    check(Shape(), [20, 35], unwritten=1)
