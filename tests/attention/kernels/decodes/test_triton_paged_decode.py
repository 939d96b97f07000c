"""Decodes over the paged cache, against attention in float64."""

import pytest
import torch

from tests.attention.kernels.features import FEATURES, HEADS, SLOW_FEATURES, Shape
from tests.attention.kernels.kernel_device import ROTATED_DTYPES, or_slow
from tests.attention.kernels.paged_case import PagedCase


@pytest.mark.parametrize("feature", or_slow(list(FEATURES), slow=SLOW_FEATURES))
def test_every_feature_equals_the_reference(feature: str) -> None:
    PagedCase(Shape(), [37, 1, 130]).check_decode(FEATURES[feature])


@pytest.mark.parametrize(
    "num_splits", or_slow([1, 2, 3, 4, 5, 6, 7, 8, 11], slow=[2, 4, 5, 6, 7, 8])
)
@pytest.mark.parametrize("feature", ["causal", "window", "sinks"])
def test_every_number_of_splits_equals_the_reference(feature: str, num_splits: int) -> None:
    shape = Shape(num_heads=2, num_kv_heads=1)
    case = PagedCase(shape, [300, 1, 0, 65])
    case.check_decode(FEATURES[feature], num_splits=num_splits)


def test_parts_that_do_not_fit_registers_are_merged_in_turns() -> None:
    # With ALiBi the last keys have the largest weights.
    case = PagedCase(Shape(num_heads=2, num_kv_heads=1), [400])
    case.check_decode({"has_alibi": True}, num_splits=25)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", ["causal", "cap and window", "ALiBi and window", "sinks"])
def test_half_precision_equals_the_reference(feature: str, dtype: torch.dtype) -> None:
    PagedCase(Shape(dtype=dtype), [90, 18, 64]).check_decode(FEATURES[feature])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), or_slow(HEADS, slow=[(3, 1), (6, 2), (7, 1), (8, 1)])
)
def test_every_ratio_of_heads_equals_the_reference(num_heads: int, num_kv_heads: int) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads)
    PagedCase(shape, [80, 7]).check_decode(FEATURES["ALiBi and window"])


@pytest.mark.parametrize("head_size", [16, 24, 80, 96, 112, 120, 192, 256])
def test_every_head_size_equals_the_reference(head_size: int) -> None:
    shape = Shape(head_size=head_size, num_heads=2, num_kv_heads=1)
    PagedCase(shape, [100]).check_decode({})


@pytest.mark.parametrize("block_size", or_slow([4, 8, 12, 16, 32, 64, 128], slow=[8, 16, 32, 64]))
@pytest.mark.parametrize("feature", ["causal", "window"])
def test_every_block_size_equals_the_reference(feature: str, block_size: int) -> None:
    PagedCase(Shape(block_size=block_size), [83, 64, 129]).check_decode(FEATURES[feature])


@pytest.mark.parametrize("window", [63, 64, 65])
def test_window_ends_at_the_right_key(window: int) -> None:
    case = PagedCase(Shape(num_heads=1, num_kv_heads=1), [63, 64, 65, 66, 127, 128, 129])
    case.check_decode({"window_left": window - 1})


def test_blocks_behind_the_window_are_not_read() -> None:
    case = PagedCase(Shape(), [175], num_freed=175 - 20)
    case.check_decode({"window_left": 19})


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_fp8_cache_equals_the_reference(
    num_splits: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    shape = Shape(dtype=dtype, cache_dtype=cache_dtype, k_scale=0.6, v_scale=1.7)
    case = PagedCase(shape, [137, 5])
    case.check_decode(FEATURES["cap and window"], num_splits=num_splits)


@pytest.mark.parametrize("feature", ["causal", "sinks"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_padding_rows_get_zeros_and_read_nothing(num_splits: int, feature: str) -> None:
    case = PagedCase(Shape(), [12, 0, 70, 0])
    # An entry beyond the cache, which must not be read.
    case.tables[1] = case.tables[3] = 2**31 - 1
    case.check_decode(FEATURES[feature], num_splits=num_splits)


@pytest.mark.parametrize("feature", ["causal", "left window", "sinks and cap"])
@pytest.mark.parametrize(
    ("num_splits", "head_size"), or_slow([(1, 32), (3, 16), (8, 128)], slow=[(8, 128)])
)
def test_new_tokens_are_rotated_and_written(feature: str, num_splits: int, head_size: int) -> None:
    # The last key is the first of a block, of a split, and of its sequence.
    case = PagedCase(Shape(head_size=head_size), [65, 1, 0, 40, 130])
    case.check_new_tokens(FEATURES[feature], num_splits=num_splits)


@pytest.mark.parametrize("dtype", ROTATED_DTYPES, ids=str)
def test_new_tokens_in_half_precision(dtype: torch.dtype) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, dtype=dtype)
    PagedCase(shape, [90, 18, 64]).check_new_tokens({}, num_splits=2)


def test_a_new_token_without_a_slot_is_not_written() -> None:
    PagedCase(Shape(), [20, 35]).check_new_tokens({}, num_splits=2, unwritten=1)


SHARED = [([0, 2, 3, 4, 6], 20), ([1, 7], 17)]
"""Sequences of `_SHARED_LENS` and the blocks of 16 keys that they share."""
_SHARED_LENS = [321, 300, 340, 390, 500, 400, 470, 273]


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "feature", or_slow(["causal", "sinks", "cap and ALiBi", "window"], slow=["window"])
)
def test_shared_prefixes_equal_the_reference(feature: str, num_splits: int) -> None:
    case = PagedCase(Shape(), _SHARED_LENS, shared=SHARED)
    case.check_decode(FEATURES[feature], num_splits=num_splits)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), or_slow(HEADS, slow=HEADS[2:]))
def test_shared_prefixes_with_every_ratio_of_heads(num_heads: int, num_kv_heads: int) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads)
    PagedCase(shape, _SHARED_LENS, shared=SHARED).check_decode({}, num_splits=5)


def test_new_tokens_behind_shared_prefixes() -> None:
    case = PagedCase(Shape(), _SHARED_LENS, shared=SHARED)
    case.check_new_tokens(FEATURES["sinks"], num_splits=5)
