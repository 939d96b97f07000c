"""Attention over keys and values in rows, against attention in float64."""

import pytest
import torch

from attention.kernels.triton.tuning import PagedAttentionTuning
from tests.attention.kernels.features import FEATURES, SLOW_FEATURES, Shape
from tests.attention.kernels.kernel_device import or_slow
from tests.attention.kernels.paged_case import PagedCase

SMALL = PagedAttentionTuning(tile_vectors=16, tile_keys=16, num_warps=4, num_stages=2)


@pytest.mark.parametrize("feature", or_slow(list(FEATURES), slow=SLOW_FEATURES))
def test_every_feature_equals_the_reference(feature: str) -> None:
    PagedCase(Shape(), [21, 19, 5]).check_ragged([9, 19, 1], FEATURES[feature], SMALL)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_equals_the_reference(dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype, head_size=24)
    PagedCase(shape, [21, 7]).check_ragged([21, 7], FEATURES["everything"])


def test_lengths_of_queries_and_keys_may_differ_both_ways() -> None:
    PagedCase(Shape(), [21, 7, 0, 3]).check_ragged([4, 30, 2, 0], FEATURES["everything"], SMALL)
