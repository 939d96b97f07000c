"""The kernel that copies weights and checks them, against torch."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from attention.kernels.cpu.finite_copy import are_finite, copy_finite

PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
]
# Of one block, of several and of a part of one in each row.
SHAPES = [(1,), (31,), (200_003,), (3, 70_001), (1001, 129), (0,), (5, 0)]
LARGEST = {
    torch.bfloat16: 3.3895e38,
    torch.float16: 65504.0,
    torch.float32: 3.4028e38,
}


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("source_dtype", "target_dtype"), PAIRS, ids=str)
def test_values_are_copied_and_checked(
    source_dtype: torch.dtype, target_dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    source = torch.randn(shape).to(source_dtype)
    flat = source.view(-1)
    if flat.numel() > 2:
        largest = LARGEST[source_dtype]
        flat[:3] = torch.tensor([largest, -largest, 1e-45], dtype=source_dtype)
    target = torch.full(shape, 7.0, dtype=target_dtype)
    assert copy_finite(target, source) is True
    assert torch.equal(target, source.to(target_dtype))
    for place in {0, flat.numel() // 2, flat.numel() - 1} if flat.numel() else ():
        for value in (math.nan, -math.nan, math.inf, -math.inf):
            old = flat[place].clone()
            flat[place] = value
            assert copy_finite(target, source) is False
            assert torch.equal(target.isfinite(), source.isfinite())
            flat[place] = old


@needs_compiler
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_values_are_checked_where_they_are(dtype: torch.dtype) -> None:
    values = torch.randn(200_003).to(dtype)
    values[:3] = torch.tensor([LARGEST[dtype], -LARGEST[dtype], 1e-45], dtype=dtype)
    kept = values.clone()
    assert are_finite(values) is True
    assert torch.equal(values, kept)
    assert are_finite(values[:0]) is True
    assert are_finite(values[::2]) is None
    assert are_finite(values.double()) is None
    for place in (0, 100_001, 200_002):
        for value in (math.nan, -math.nan, math.inf, -math.inf):
            values[place] = value
            assert are_finite(values) is False
        values[place] = kept[place]


@needs_compiler
@pytest.mark.parametrize(("source_dtype", "target_dtype"), PAIRS, ids=str)
def test_only_the_rows_are_copied(source_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    whole = torch.full((40, 3000), math.nan, dtype=source_dtype)
    whole[:, 100:2500] = torch.randn(40, 2400).to(source_dtype)
    around = torch.full((80, 2600), 7.0, dtype=target_dtype)
    source, target = whole[:, 100:2500], around[::2, 50:2450]
    assert copy_finite(target, source) is True
    assert torch.equal(target, source.to(target_dtype))
    target.fill_(7.0)
    assert bool((around == 7.0).all())
    source[-1, -1] = math.inf
    assert copy_finite(target, source) is False


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(4, dtype=torch.float16), torch.zeros(4)),
        (torch.zeros(4, 4).t(), torch.zeros(4, 4)),
        (torch.zeros(4, 4), torch.zeros(4, 8)[:, ::2]),
        (torch.zeros(2, 6, 4)[:, ::3], torch.zeros(2, 2, 4)),
        (torch.zeros(4, device="meta"), torch.zeros(4)),
    ],
    ids=["dtypes", "transposed", "columns", "three dimensions", "device"],
)
def test_other_tensors_are_left_to_torch(target: torch.Tensor, source: torch.Tensor) -> None:
    assert copy_finite(target, source) is None
