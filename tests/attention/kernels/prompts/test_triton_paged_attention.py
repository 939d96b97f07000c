"""Chunks and prefills over the paged cache, against attention in float64."""

import pytest
import torch

from attention.kernels.triton.tuning import PagedAttentionTuning
from tests.attention.kernels.features import FEATURES, HEADS, SLOW_FEATURES, Shape
from tests.attention.kernels.kernel_device import or_slow
from tests.attention.kernels.paged_case import PagedCase

SMALL = PagedAttentionTuning(tile_vectors=16, tile_keys=16, num_warps=4, num_stages=2)
DEFAULT_FEATURES = ("causal", "two-sided window", "ALiBi and window", "cap and window", "sinks")


@pytest.mark.parametrize("feature", or_slow(list(FEATURES), slow=SLOW_FEATURES))
def test_every_feature_equals_the_reference(feature: str) -> None:
    case = PagedCase(Shape(), [37, 5, 21])
    case.check_chunks([9, 5, 1], FEATURES[feature], SMALL)


@pytest.mark.parametrize(
    "feature",
    or_slow(list(FEATURES), slow=[one for one in FEATURES if one not in DEFAULT_FEATURES]),
)
def test_default_tuning_equals_the_reference(feature: str) -> None:
    PagedCase(Shape(), [70, 3]).check_chunks([19, 2], FEATURES[feature])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", ["causal", "cap and window", "ALiBi and window"])
def test_half_precision_equals_the_reference(feature: str, dtype: torch.dtype) -> None:
    PagedCase(Shape(dtype=dtype), [37, 18]).check_chunks([9, 18], FEATURES[feature], SMALL)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_every_ratio_of_heads_equals_the_reference(num_heads: int, num_kv_heads: int) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads)
    PagedCase(shape, [20, 7]).check_chunks([6, 7], FEATURES["ALiBi and window"])


@pytest.mark.parametrize("head_size", [16, 24, 80, 96, 112, 120, 192, 256])
def test_every_head_size_equals_the_reference(head_size: int) -> None:
    shape = Shape(head_size=head_size, num_heads=2, num_kv_heads=1)
    PagedCase(shape, [20]).check_chunks([6], {}, SMALL)


@pytest.mark.parametrize("block_size", [4, 8, 12, 16, 32, 64, 128])
def test_every_block_size_equals_the_reference(block_size: int) -> None:
    shape = Shape(block_size=block_size)
    PagedCase(shape, [83, 64]).check_chunks([4, 2], FEATURES["two-sided window"])
    PagedCase(shape, [83, 64]).check_chunks([4, 2], {}, SMALL)


@pytest.mark.parametrize("window", [15, 16, 17])
def test_window_ends_at_the_right_key(window: int) -> None:
    feature = {"window_left": window - 1}
    case = PagedCase(Shape(num_heads=1, num_kv_heads=1), [15, 16, 17, 18, 31, 32, 33])
    case.check_chunks([2] * 7, feature, SMALL)


def test_blocks_behind_the_window_are_not_read() -> None:
    case = PagedCase(Shape(), [75], num_freed=75 - 4 - 19)
    case.check_chunks([4], {"window_left": 19}, SMALL)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", ["causal", "cap and window"])
def test_fp8_cache_equals_the_reference(
    feature: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    shape = Shape(dtype=dtype, cache_dtype=cache_dtype, k_scale=0.6, v_scale=1.7)
    PagedCase(shape, [37, 5]).check_chunks([9, 5], FEATURES[feature], SMALL)


def test_sequence_without_keys_gets_zeros() -> None:
    case = PagedCase(Shape(), [0, 12, 0])
    # An entry beyond the cache, which must not be read.
    case.tables[0] = case.tables[2] = 2**31 - 1
    case.check_chunks([3, 2, 1], {}, SMALL)


def test_sequence_without_queries_is_skipped() -> None:
    PagedCase(Shape(), [9, 12, 4]).check_chunks([2, 0, 4], {}, SMALL)


@pytest.mark.parametrize("feature", ["causal", "sinks"])
def test_queries_before_the_first_key_get_zeros(feature: str) -> None:
    PagedCase(Shape(), [3, 2]).check_chunks([7, 2], FEATURES[feature], SMALL)


def test_cross_attention_may_have_more_queries_than_keys() -> None:
    PagedCase(Shape(), [3, 20]).check_chunks([7, 9], {"window_right": -1}, SMALL)


def test_cap_bounds_large_scores() -> None:
    case = PagedCase(Shape(), [30])
    feature = {"scale": 40.0}
    torch.manual_seed(1)
    uncapped = case.check_chunks([4], feature, SMALL)
    torch.manual_seed(1)
    capped = case.check_chunks([4], feature | {"soft_cap": 5.0}, SMALL)
    assert (capped - uncapped)[:4].norm() > 0.1 * uncapped[:4].norm()
