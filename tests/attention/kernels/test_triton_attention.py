"""Decodes, chunks and prefills over the paged cache and over rows, against attention in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from attention.kernels.triton.tuning import PagedAttentionTuning
from tests.attention.kernels.features import FEATURES, HEADS, SLOW_FEATURES, Shape
from tests.attention.kernels.kernel_device import ROTATED_DTYPES, or_slow
from tests.attention.kernels.paged_case import PagedCase

SMALL = PagedAttentionTuning(tile_vectors=16, tile_keys=16, num_warps=4, num_stages=2)
DEFAULT_FEATURES = ("causal", "two-sided window", "ALiBi and window", "cap and window", "sinks")
ONE_HEAD = Shape(num_heads=2, num_kv_heads=1)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
CACHE_DTYPES = pytest.mark.parametrize(
    "cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
SHARED = [([0, 2, 3, 4, 6], 20), ([1, 7], 17)]
"""Sequences of `_SHARED_LENS` and the blocks of 16 keys that they share."""
_SLOW_SHARED = [
    *(("causal", 3), ("sinks", 1), ("cap and ALiBi", 3)),
    *(("window", 1), ("window", 3)),
]
_SHARED_LENS = [321, 300, 340, 390, 500, 400, 470, 273]


@pytest.mark.parametrize("feature", or_slow(list(FEATURES), slow=SLOW_FEATURES))
@pytest.mark.parametrize("kernel", ["decode", "chunks", "ragged"])
def test_every_feature_equals_the_reference(kernel: str, feature: str) -> None:
    if kernel == "decode":
        PagedCase(Shape(), [37, 1, 130]).check_decode(FEATURES[feature])
    elif kernel == "chunks":
        PagedCase(Shape(), [37, 5, 21]).check_chunks([9, 5, 1], FEATURES[feature], SMALL)
    else:
        PagedCase(Shape(), [21, 19, 5]).check_ragged([9, 19, 1], FEATURES[feature], SMALL)


@pytest.mark.parametrize(
    "feature",
    or_slow(list(FEATURES), slow=[one for one in FEATURES if one not in DEFAULT_FEATURES]),
)
def test_default_tuning_equals_the_reference(feature: str) -> None:
    PagedCase(Shape(), [70, 3]).check_chunks([19, 2], FEATURES[feature])


@HALVES
@pytest.mark.parametrize("feature", ["causal", "cap and window", "ALiBi and window", "sinks"])
def test_half_precision_equals_the_reference(feature: str, dtype: torch.dtype) -> None:
    PagedCase(Shape(dtype=dtype), [90, 18, 64]).check_decode(FEATURES[feature])
    if feature != "sinks":
        PagedCase(Shape(dtype=dtype), [37, 18]).check_chunks([9, 18], FEATURES[feature], SMALL)


@HALVES
def test_half_precision_of_rows_equals_the_reference(dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype, head_size=24)
    PagedCase(shape, [21, 7]).check_ragged([21, 7], FEATURES["everything"])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), or_slow(HEADS, slow=[(3, 1), (6, 2), (7, 1), (8, 1)])
)
def test_every_ratio_of_heads_equals_the_reference_in_decodes(
    num_heads: int, num_kv_heads: int
) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads)
    PagedCase(shape, [80, 7]).check_decode(FEATURES["ALiBi and window"])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_every_ratio_of_heads_equals_the_reference_in_chunks(
    num_heads: int, num_kv_heads: int
) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads)
    PagedCase(shape, [20, 7]).check_chunks([6, 7], FEATURES["ALiBi and window"])


@pytest.mark.parametrize("head_size", [16, 24, 80, 96, 112, 120, 192, 256])
def test_every_head_size_equals_the_reference(head_size: int) -> None:
    shape = Shape(head_size=head_size, num_heads=2, num_kv_heads=1)
    PagedCase(shape, [100]).check_decode({})
    PagedCase(shape, [20]).check_chunks([6], {}, SMALL)


@pytest.mark.parametrize("block_size", or_slow([4, 8, 12, 16, 32, 64, 128], slow=[8, 16, 32, 64]))
@pytest.mark.parametrize("feature", ["causal", "window"])
def test_every_block_size_equals_the_reference_in_decodes(feature: str, block_size: int) -> None:
    PagedCase(Shape(block_size=block_size), [83, 64, 129]).check_decode(FEATURES[feature])


@pytest.mark.parametrize("block_size", [4, 8, 12, 16, 32, 64, 128])
def test_every_block_size_equals_the_reference_in_chunks(block_size: int) -> None:
    shape = Shape(block_size=block_size)
    PagedCase(shape, [83, 64]).check_chunks([4, 2], FEATURES["two-sided window"])
    PagedCase(shape, [83, 64]).check_chunks([4, 2], {}, SMALL)


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_window_ends_at_the_right_key(offset: int) -> None:
    shape = Shape(num_heads=1, num_kv_heads=1)
    case = PagedCase(shape, [63, 64, 65, 66, 127, 128, 129])
    case.check_decode({"window_left": 64 + offset - 1})
    case = PagedCase(shape, [15, 16, 17, 18, 31, 32, 33])
    case.check_chunks([2] * 7, {"window_left": 16 + offset - 1}, SMALL)


def test_blocks_behind_the_window_are_not_read() -> None:
    PagedCase(Shape(), [175], num_freed=175 - 20).check_decode({"window_left": 19})
    case = PagedCase(Shape(), [75], num_freed=75 - 4 - 19)
    case.check_chunks([4], {"window_left": 19}, SMALL)


@CACHE_DTYPES
@DTYPES
def test_fp8_cache_equals_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype, cache_dtype=cache_dtype, k_scale=0.6, v_scale=1.7)
    for num_splits in (1, 3):
        case = PagedCase(shape, [137, 5])
        case.check_decode(FEATURES["cap and window"], num_splits=num_splits)
    for feature in ("causal", "cap and window"):
        PagedCase(shape, [37, 5]).check_chunks([9, 5], FEATURES[feature], SMALL)


@pytest.mark.parametrize(
    "num_splits", or_slow([1, 2, 3, 4, 5, 6, 7, 8, 11], slow=[2, 4, 5, 6, 7, 8])
)
@pytest.mark.parametrize("feature", ["causal", "window", "sinks"])
def test_every_number_of_splits_equals_the_reference(feature: str, num_splits: int) -> None:
    PagedCase(ONE_HEAD, [300, 1, 0, 65]).check_decode(FEATURES[feature], num_splits=num_splits)


def test_parts_that_do_not_fit_registers_are_merged_in_turns() -> None:
    # With ALiBi the last keys have the largest weights.
    PagedCase(ONE_HEAD, [400]).check_decode({"has_alibi": True}, num_splits=25)


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


@pytest.mark.parametrize(
    ("feature", "num_splits"),
    or_slow([("causal", 1), ("sinks", 3), ("cap and ALiBi", 1), *_SLOW_SHARED], slow=_SLOW_SHARED),
)
def test_shared_prefixes_equal_the_reference(feature: str, num_splits: int) -> None:
    case = PagedCase(Shape(), _SHARED_LENS, shared=SHARED)
    case.check_decode(FEATURES[feature], num_splits=num_splits)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), or_slow(HEADS, slow=[one for one in HEADS if one != (3, 1)])
)
def test_shared_prefixes_with_every_ratio_of_heads(num_heads: int, num_kv_heads: int) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads)
    PagedCase(shape, _SHARED_LENS, shared=SHARED).check_decode({}, num_splits=5)


def test_new_tokens_behind_shared_prefixes() -> None:
    case = PagedCase(Shape(), _SHARED_LENS, shared=SHARED)
    case.check_new_tokens(FEATURES["sinks"], num_splits=5)


def check_two_kernels(shape: Shape, seq_lens: list[int], unwritten: int | None = None) -> None:
    """Check new tokens against the reference, and that the decode alone has the same bits."""
    one, two = PagedCase(shape, seq_lens), PagedCase(shape, seq_lens)
    torch.manual_seed(1)
    alone = one.check_new_tokens({}, num_splits=2, unwritten=unwritten)
    torch.manual_seed(1)
    after = two.check_new_tokens({}, num_splits=2, unwritten=unwritten, by_two_kernels=True)
    torch.testing.assert_close(after, alone, rtol=0, atol=0)
    torch.testing.assert_close(two.cache, one.cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ROTATED_DTYPES, ids=str)
def test_another_kernel_writes_new_tokens_in_half_precision(dtype: torch.dtype) -> None:
    shape = Shape(num_heads=32, num_kv_heads=8, head_size=128, dtype=dtype)
    check_two_kernels(shape, [90, 18, 64])


@pytest.mark.parametrize(
    ("shape", "seq_lens", "unwritten"),
    [
        *(
            pytest.param(
                Shape(num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size),
                [65, 1, 0, 9],
                None,
                marks=[pytest.mark.slow] if heads in HEADS[3:5] else [],
            )
            for heads in HEADS
            for head_size in (16, 128)
        ),
        # Heads that are divided among programs.
        *(
            (Shape(num_heads=num_heads, num_kv_heads=num_kv_heads), [9, 3], None)
            for num_heads, num_kv_heads in ((40, 5), (64, 1))
        ),
        pytest.param(Shape(num_heads=48, num_kv_heads=48), [9, 3], None, marks=pytest.mark.slow),
        # A token without a slot is not written.
        (Shape(), [20, 35], 1),
    ],
    ids=repr,
)
def test_another_kernel_writes_new_tokens_with_the_bits_of_the_decode(
    shape: Shape, seq_lens: list[int], unwritten: int | None
) -> None:
    check_two_kernels(shape, seq_lens, unwritten)


@pytest.mark.parametrize(
    ("seq_lens", "num_queries", "feature"),
    [
        # A sequence without queries is skipped.
        ([9, 12, 4], [2, 0, 4], {}),
        # Queries before the first key get zeros.
        ([3, 2], [7, 2], {}),
        ([3, 2], [7, 2], FEATURES["sinks"]),
        # In cross-attention there may be more queries than keys.
        ([3, 20], [7, 9], {"window_right": -1}),
    ],
)
def test_queries_and_keys_differ_in_number(
    seq_lens: list[int],
    num_queries: Sequence[int],
    feature: dict[str, Any],  # Any: options of all types
) -> None:
    PagedCase(Shape(), seq_lens).check_chunks(list(num_queries), feature, SMALL)


def test_lengths_of_queries_and_keys_of_rows_may_differ_both_ways() -> None:
    PagedCase(Shape(), [21, 7, 0, 3]).check_ragged([4, 30, 2, 0], FEATURES["everything"], SMALL)


def test_sequence_without_keys_gets_zeros() -> None:
    case = PagedCase(Shape(), [0, 12, 0])
    # An entry beyond the cache, which must not be read.
    case.tables[0] = case.tables[2] = 2**31 - 1
    case.check_chunks([3, 2, 1], {}, SMALL)


def test_cap_bounds_large_scores() -> None:
    case = PagedCase(Shape(), [30])
    feature = {"scale": 40.0}
    torch.manual_seed(1)
    uncapped = case.check_chunks([4], feature, SMALL)
    torch.manual_seed(1)
    capped = case.check_chunks([4], feature | {"soft_cap": 5.0}, SMALL)
    assert (capped - uncapped)[:4].norm() > 0.1 * uncapped[:4].norm()
