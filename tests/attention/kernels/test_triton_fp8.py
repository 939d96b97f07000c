"""Quantization of rows and products with fp8 weights, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import QuantizedRows
from attention.kernels.triton.fp8_rows import quantize_blocks, quantize_rows
from attention.kernels.triton.gated_activation import gated, quantized_gated
from attention.kernels.triton.gemm.block_fp8 import block_fp8_gemm
from attention.kernels.triton.gemm.skinny import (
    MAX_ROWS,
    SkinnyGemmTuning,
    fp8_skinny_tuning,
    skinny_gated,
    skinny_gemm,
)
from attention.kernels.triton.norm_rope import add_norm, quantized_add_norm
from tests.attention.kernels.kernel_device import DEVICE

TUNING = SkinnyGemmTuning(tile_columns=16, tile_depth=32, num_warps=2, num_stages=3)
DTYPES = [torch.float32, torch.bfloat16]


def fp8_weight(out_size: int, in_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values of all magnitudes, scales, and in float64 what they stand for."""
    values = torch.randn(out_size, in_size) * 2.0 ** torch.randint(-12, 8, (out_size, in_size))
    fp8 = values.clamp(-448, 448).to(torch.float8_e4m3fn).to(DEVICE)
    scales = (torch.rand(out_size, 1) / 400).to(DEVICE)
    return fp8, scales, fp8.double() * scales.double()


def rows_of(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a wider matrix."""
    return torch.randn(num_rows, size + 16).to(dtype).to(DEVICE)[:, :size]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def without_rounding(num_rows: int, size: int) -> torch.Tensor:
    """Return normal numbers of fp8, up to the largest, since the interpreter does not round."""
    values = torch.randn(num_rows, size).sign() * (1 + torch.randint(0, 8, (num_rows, size)) / 8)
    values *= 2.0 ** torch.randint(-6, 8, (num_rows, size))
    values[:, 5] = -448.0
    return values.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_row_is_divided_by_its_own_scale(dtype: torch.dtype) -> None:
    values = without_rounding(5, 100)
    factors = torch.tensor([[2.0**power] for power in (-7, -1, 0, 3, 20)], device=DEVICE)
    found = quantize_rows((values * factors).to(dtype), None)
    assert torch.equal(found.scales, factors)
    assert torch.equal(found.values.float(), values)


def test_a_row_of_zeros_stays_zero() -> None:
    found = quantize_rows(torch.zeros(2, 40, device=DEVICE), None)
    assert not found.values.float().any()
    assert bool(found.scales.isfinite().all())


def test_a_given_scale_is_used_and_limits_the_values() -> None:
    values = without_rounding(3, 40)
    x = values * 0.5
    x[1, 7], x[2, 3] = 1e4, -1e4
    found = quantize_rows(x, torch.tensor([0.5], device=DEVICE))
    values[1, 7], values[2, 3] = 448.0, -448.0
    assert found.scales.tolist() == [[0.5]] * 3
    assert torch.equal(found.values.float(), values)


def assert_equal_rows(found: QuantizedRows, rows: torch.Tensor, exact: torch.Tensor) -> None:
    """Check rows that a kernel computed and quantized in one go against the two one by one."""
    expected = quantize_rows(rows, None)
    assert torch.equal(found.values.float(), expected.values.float())
    assert torch.equal(found.scales, expected.scales)
    assert found.dtype == rows.dtype
    largest = exact.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, largest / 448)
    torch.testing.assert_close(found.scales.double(), scales, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_products_are_quantized(dtype: torch.dtype) -> None:
    columns = rows_of(4, 200, dtype)
    columns[2] = 0.0
    gate, other = columns.double().chunk(2, dim=1)
    assert_equal_rows(
        quantized_gated(columns, "silu"), gated(columns, "silu"), functional.silu(gate) * other
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_delta", [False, True])
def test_norms_are_quantized_and_the_stream_is_the_sum(has_delta: bool, dtype: torch.dtype) -> None:
    stream, delta = rows_of(4, 100, dtype), rows_of(4, 100, dtype) if has_delta else None
    weight = torch.randn(100).to(dtype).to(DEVICE)
    sums = stream.clone()
    rows = add_norm(sums, delta, weight, None, 1e-6, is_centered=False)
    found = quantized_add_norm(stream, delta, weight, None, 1e-6, is_centered=False)
    assert torch.equal(stream, sums)
    exact = functional.rms_norm(stream.double(), (100,), weight.double(), 1e-6)
    assert_equal_rows(found, rows, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, MAX_ROWS])
def test_product_equals_that_of_dequantized_weights(num_rows: int, dtype: torch.dtype) -> None:
    values, scales, weight = fp8_weight(40, 96)
    x = rows_of(num_rows, 96, dtype)
    bias = torch.randn(40).to(dtype).to(DEVICE)
    exact = functional.linear(x.double(), weight)
    assert_near(skinny_gemm(x, values, None, TUNING, scales=scales), exact)
    assert_near(skinny_gemm(x, values, bias, TUNING, scales=scales), exact + bias.double())


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
def test_both_halves_of_a_gate_have_their_scales(num_rows: int) -> None:
    values, scales, weight = fp8_weight(2 * 24, 256)
    x = rows_of(num_rows, 256, torch.float32)
    gate, other = functional.linear(x.double(), weight).chunk(2, 1)
    tuning = fp8_skinny_tuning(48, 256, 256, is_gated=True)
    assert tuning is not None
    gated = skinny_gated(x, values, "silu", tuning, scales=scales)
    assert_near(gated, functional.silu(gate) * other)


def block_scaled(out_size: int, in_size: int, depth: int) -> tuple[torch.Tensor, ...]:
    """As `fp8_weight`, with a scale for each block of inputs."""
    values, _, _ = fp8_weight(out_size, in_size)
    scales = (torch.rand(out_size, -(-in_size // depth)) / 400).to(DEVICE)
    spread = scales.double().repeat_interleave(depth, 1)[:, :in_size]
    return values, scales, values.double() * spread


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
def test_few_rows_use_the_scales_of_blocks(num_rows: int) -> None:
    values, scales, weight = block_scaled(40, 192, 64)
    x = rows_of(num_rows, 192, torch.float32)
    tuning = fp8_skinny_tuning(40, 192, 64, is_gated=False)
    assert tuning is not None
    exact = functional.linear(x.double(), weight)
    assert_near(skinny_gemm(x, values, None, tuning, scales=scales), exact)
    gate, other = exact.chunk(2, 1)
    gated = skinny_gated(x, values, "silu", tuning, scales=scales)
    assert_near(gated, functional.silu(gate) * other)


def test_each_block_is_divided_by_its_own_scale() -> None:
    # 40 blocks of 32 and a part of one: more than one program of a row.
    values = without_rounding(3, 1290)
    values[:, ::32] = 448.0
    factors = torch.tensor([2.0]).pow(torch.randint(-9, 9, (3, 41))).to(DEVICE)
    x = values * factors.repeat_interleave(32, 1)[:, :1290]
    found, scales = quantize_blocks(x, 32)
    assert torch.equal(scales, factors)
    assert torch.equal(found.float(), values)


@pytest.mark.parametrize(("num_rows", "out_size"), [(17, 48), (70, 150)])
def test_many_rows_use_the_scales_of_blocks(num_rows: int, out_size: int) -> None:
    values, scales, weight = block_scaled(out_size, 112, 32)
    rows, row_scales, exact_rows = block_scaled(num_rows, 112, 32)
    bias = torch.randn(out_size, device=DEVICE)
    exact = functional.linear(exact_rows, weight, bias.double())
    found = block_fp8_gemm(rows, row_scales, values, scales, bias, depth=32, dtype=torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
