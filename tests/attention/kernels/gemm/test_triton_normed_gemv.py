"""Products that norm the row that they read, and that add to the row that they write.

Against torch in float64, and against the kernels whose work they do.
"""

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import DeferredRMSNorm
from attention.kernels.triton.gemm.gemv import (
    GemvTuning,
    add_gemv,
    default_gemv_tuning,
    gemv,
    gemv_gated,
)
from attention.kernels.triton.gemm.normed_gemv import normed_gemv, normed_gemv_gated
from attention.kernels.triton.norm_rope import add_norm
from tests.attention.kernels.kernel_device import DEVICE

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCES)
TUNING = GemvTuning(tile_columns=4, tile_bytes=256, num_warps=1)
# A row of one tile, one that tiles divide, and one that they do not divide.
SIZES = [16, 1024, 600]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def unnormed(size: int, dtype: torch.dtype, norm_dtype: torch.dtype, eps: float) -> DeferredRMSNorm:
    stream = 3 * random(1, size, dtype=dtype)
    return DeferredRMSNorm(stream.to(DEVICE), random(size, dtype=norm_dtype).to(DEVICE), eps)


def written_norm(row: DeferredRMSNorm) -> torch.Tensor:
    """Return the norm as a kernel of its own computes it."""
    return add_norm(row.stream, None, row.weight, None, row.eps, is_centered=False)


def exact_norm(row: DeferredRMSNorm) -> torch.Tensor:
    weight = row.weight.double()
    return functional.rms_norm(row.stream.double(), weight.shape, weight, row.eps)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("eps", [1e-6, 5.0])
def test_product_is_that_of_the_norm(size: int, eps: float, dtype: torch.dtype) -> None:
    row = unnormed(size, dtype, dtype, eps)
    weight = (random(6, size, dtype=dtype) / size**0.5).to(DEVICE)
    bias = random(6, dtype=dtype).to(DEVICE)
    kept = row.stream.clone()
    product = normed_gemv(row, weight, bias, TUNING)
    exact = functional.linear(exact_norm(row), weight.double(), bias.double())
    assert_near(product, exact, dtype)
    assert_near(product, gemv(written_norm(row), weight, bias, TUNING), dtype)
    gate, other = functional.linear(exact_norm(row), weight.double()).chunk(2, 1)
    gated = normed_gemv_gated(row, weight, "silu", TUNING)
    assert_near(gated, functional.silu(gate) * other, dtype)
    assert_near(gated, gemv_gated(written_norm(row), weight, "silu", TUNING), dtype)
    assert torch.equal(row.stream, kept)


def test_inputs_are_rounded_as_a_norm_that_is_written() -> None:
    row = unnormed(1024, torch.bfloat16, torch.bfloat16, 1e-5)
    weight = (random(64, 1024, dtype=torch.bfloat16) / 32).to(DEVICE)
    found = normed_gemv(row, weight, None, TUNING)
    expected = gemv(written_norm(row), weight, None, TUNING)
    # The sum of squares has another order, so that an element may round to its other neighbor.
    assert (found == expected).double().mean() > 0.9


def test_a_weight_of_the_norm_may_be_float32() -> None:
    row = unnormed(640, torch.bfloat16, torch.float32, 1e-6)
    weight = (random(8, 640, dtype=torch.bfloat16) / 25).to(DEVICE)
    exact = functional.linear(exact_norm(row), weight.double())
    assert_near(normed_gemv(row, weight, None, TUNING), exact, torch.bfloat16)


@pytest.mark.parametrize("is_gated", [False, True])
def test_default_tuning_computes_the_same(*, is_gated: bool) -> None:
    row = unnormed(1152, torch.bfloat16, torch.bfloat16, 1e-6)
    weight = (random(8, 1152, dtype=torch.bfloat16) / 34).to(DEVICE)
    tuning = default_gemv_tuning(weight, is_gated=is_gated)
    assert tuning is not None
    exact = functional.linear(exact_norm(row), weight.double())
    if is_gated:
        gate, other = exact.chunk(2, 1)
        found = normed_gemv_gated(row, weight, "silu", tuning)
        assert_near(found, functional.silu(gate) * other, torch.bfloat16)
    else:
        assert_near(normed_gemv(row, weight, None, tuning), exact, torch.bfloat16)


# Numpy, by which the interpreter computes, warns.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_not_hidden(value: float) -> None:
    row = unnormed(640, torch.bfloat16, torch.bfloat16, 1e-6)
    row.stream[0, 321] = value
    weight = random(4, 640, dtype=torch.bfloat16).to(DEVICE)
    assert not normed_gemv(row, weight, None, TUNING).isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_size", [6, 8])
def test_a_product_is_added_as_if_it_were_written_first(out_size: int, dtype: torch.dtype) -> None:
    x, stream = (random(1, size, dtype=dtype).to(DEVICE) for size in (640, out_size + 4))
    weight = (random(out_size, 640, dtype=dtype) / 25).to(DEVICE)
    bias = random(out_size, dtype=dtype).to(DEVICE)
    kept = stream.clone()
    add_gemv(stream[:, :out_size], x, weight, bias, TUNING)
    unfused = kept[:, :out_size].clone()
    product = gemv(x, weight, bias, TUNING)
    add_norm(unfused, product, bias, None, 1e-6, is_centered=False)
    assert torch.equal(stream[:, :out_size], unfused)
    # Nothing behind the row is written.
    assert torch.equal(stream[:, out_size:], kept[:, out_size:])
    exact = kept[:, :out_size].double() + functional.linear(
        x.double(), weight.double(), bias.double()
    )
    assert_near(stream[:, :out_size], exact, dtype)
