"""GEMMs of a few rows, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.triton.gemm.skinny import (
    MAX_ROWS,
    SkinnyGemmTuning,
    default_skinny_tuning,
    skinny_gated,
    skinny_gemm,
)
from tests.attention.kernels.kernel_device import DEVICE

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TUNING = SkinnyGemmTuning(tile_columns=16, tile_depth=32, num_warps=2, num_stages=3)


def weights(out_size: int, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    weight: torch.Tensor = torch.randn(out_size, in_size) / in_size**0.5
    return weight.to(dtype).to(DEVICE)


def strided(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a wider matrix."""
    return torch.randn(num_rows, size + 16).to(dtype).to(DEVICE)[:, :size]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7, MAX_ROWS])
@pytest.mark.parametrize("out_size", [16, 40])
def test_product_equals_that_of_float64(out_size: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = strided(num_rows, 96, dtype), weights(out_size, 96, dtype)
    bias = torch.randn(out_size).to(dtype).to(DEVICE)
    exact = functional.linear(x.double(), weight.double())
    assert_near(skinny_gemm(x, weight, None, TUNING), exact)
    assert_near(skinny_gemm(x, weight, bias, TUNING), exact + bias.double())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
def test_gate_is_applied_to_the_product(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = strided(num_rows, 64, dtype), weights(2 * 24, 64, dtype)
    gate, other = functional.linear(x.double(), weight.double()).chunk(2, 1)
    assert_near(skinny_gated(x, weight, "silu", TUNING), functional.silu(gate) * other)


@pytest.mark.parametrize("is_gated", [False, True])
def test_default_tuning_computes_the_same(is_gated: bool) -> None:
    tuning = default_skinny_tuning(96, 512, is_gated=is_gated)
    assert tuning is not None
    x, weight = strided(3, 512, torch.float16), weights(96, 512, torch.float16)
    exact = functional.linear(x.double(), weight.double())
    if is_gated:
        gate, other = exact.chunk(2, 1)
        exact = functional.silu(gate) * other
        assert_near(skinny_gated(x, weight, "silu", tuning), exact)
    else:
        assert_near(skinny_gemm(x, weight, None, tuning), exact)


def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    x = torch.ones(3, 32, device=DEVICE)
    x[1, 5] = torch.nan
    product = skinny_gemm(x, weights(16, 32, torch.float32), None, TUNING)
    assert product.isnan().any(1).tolist() == [False, True, False]


def test_no_rows_give_no_rows() -> None:
    none = torch.empty(0, 32, device=DEVICE)
    assert skinny_gemm(none, weights(16, 32, torch.float32), None, TUNING).shape == (0, 16)


@pytest.mark.parametrize(("out_size", "in_size"), [(128256, 4096), (4096, 4000)])
def test_shapes_for_which_another_kernel_is_faster_have_no_tuning(
    out_size: int, in_size: int
) -> None:
    assert default_skinny_tuning(out_size, in_size, is_gated=False) is None
