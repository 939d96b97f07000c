"""Products of one row with weights of every format, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import DeferredRMSNorm, RowConv, Segments
from attention.kernels.recurrent import causal_conv
from attention.kernels.triton.gemm.gemv import (
    GemvTuning,
    add_gemv,
    default_gemv_tuning,
    gemv,
    gemv_gated,
)
from attention.kernels.triton.gemm.int4 import packed_int4, scale_words
from attention.kernels.triton.gemm.normed_gemv import normed_gemv, normed_gemv_gated
from attention.kernels.triton.norm_rope import add_norm
from tests.attention.kernels.kernel_device import DEVICE

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TUNING = GemvTuning(tile_columns=4, tile_bytes=256, num_warps=1)
FORMATS = ("plain", "fp8", "fp8 blocks", "int4 by 32", "int4 by 128")
DTYPES = list(TOLERANCES)
# A row of one tile, one that tiles divide, and one that they do not divide.
SIZES = [16, 1024, 600]


class Weight:
    """A random weight as a format stores it, and what it stands for."""

    def __init__(self, format: str, out_size: int, in_size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(out_size + in_size)

        def rand(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator)

        normal = torch.randn(out_size, in_size, generator=generator)
        self.scales: torch.Tensor | None = None
        if format == "plain":
            self.stored = (normal / in_size**0.5).to(dtype)
            self.exact = self.stored.double()
        elif format.startswith("fp8"):
            num_scales = in_size // 64 if format == "fp8 blocks" else 1
            self.stored = normal.to(torch.float8_e4m3fn)
            self.scales = (rand(out_size, num_scales) + 0.5) / in_size**0.5
            spread = self.scales.double().repeat_interleave(in_size // num_scales, dim=1)
            self.exact = self.stored.double() * spread
        else:
            group_size = int(format.split()[-1])
            numbers = rand(out_size, in_size).mul(16).to(torch.uint8)
            # A checkpoint may store one less than a zero of 16.
            zeros = rand(out_size, in_size // group_size).mul(17).to(torch.uint8)
            scales = (rand(*zeros.shape) / in_size**0.5).half().float()
            groups = numbers.double().view(*zeros.shape, group_size) - zeros.double().unsqueeze(2)
            self.exact = (groups * scales.double().unsqueeze(2)).flatten(1)
            self.stored = packed_int4(numbers, group_size)
            self.scales = scale_words(scales, zeros).to(DEVICE)
        self.stored, self.exact = self.stored.to(DEVICE), self.exact.to(DEVICE)
        if self.scales is not None:
            self.scales = self.scales.to(DEVICE)


def row(in_size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, in_size).to(dtype).to(DEVICE)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    # On GPUs, products of narrow weights are added in float16 before float32, and sums may cancel.
    tolerance = max(TOLERANCES[dtype], 1e-2 if DEVICE == "cuda" else 0.0)
    norm = float(expected.norm())
    assert float((actual.double() - expected).norm()) <= tolerance * max(norm, 1e-30)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("out_size", "in_size", "dtype"),
    [
        (6, 640, torch.bfloat16),
        (8, 256, torch.float16),
        (3, 1280, torch.float32),
    ],
    ids=str,
)
def test_product_equals_that_of_float64(
    format: str, out_size: int, in_size: int, dtype: torch.dtype
) -> None:
    weight, x = Weight(format, out_size, in_size, dtype), row(in_size, dtype)
    bias = torch.randn(out_size).to(dtype).to(DEVICE)
    exact = functional.linear(x.double(), weight.exact)
    product = gemv(x, weight.stored, None, TUNING, scales=weight.scales)
    assert_near(product, exact, dtype)
    product = gemv(x, weight.stored, bias, TUNING, scales=weight.scales)
    assert_near(product, exact + bias.double(), dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [3, 8])
def test_gate_is_applied_to_the_product(format: str, size: int) -> None:
    weight, x = Weight(format, 2 * size, 640, torch.float16), row(640, torch.float16)
    gate, other = functional.linear(x.double(), weight.exact).chunk(2, 1)
    gated = gemv_gated(x, weight.stored, "silu", TUNING, scales=weight.scales)
    assert_near(gated, functional.silu(gate) * other, torch.float16)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_default_tuning_computes_the_same(format: str, *, is_gated: bool) -> None:
    weight, x = Weight(format, 8, 640, torch.bfloat16), row(640, torch.bfloat16)
    tuning = default_gemv_tuning(weight.stored, is_gated=is_gated)
    assert tuning is not None
    exact = functional.linear(x.double(), weight.exact)
    if is_gated:
        gate, other = exact.chunk(2, 1)
        product = gemv_gated(x, weight.stored, "silu", tuning, scales=weight.scales)
        assert_near(product, functional.silu(gate) * other, torch.bfloat16)
    else:
        product = gemv(x, weight.stored, None, tuning, scales=weight.scales)
        assert_near(product, exact, torch.bfloat16)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("factor", [1e-30, 1e6])
def test_inputs_of_any_magnitude_keep_their_digits(format: str, factor: float) -> None:
    weight = Weight(format, 4, 640, torch.bfloat16)
    # A vector of inputs has its own magnitude.
    x = (row(640, torch.bfloat16) * factor).mul_(1.0)
    x[:, 300:] *= 1e-4
    exact = functional.linear(x.double(), weight.exact)
    product = gemv(x, weight.stored, None, TUNING, scales=weight.scales)
    assert_near(product, exact, torch.bfloat16)


# Numpy, by which the interpreter computes, warns.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_not_hidden(format: str, value: float) -> None:
    weight, x = Weight(format, 4, 640, torch.float32), row(640, torch.float32)
    x[0, 321] = value
    product = gemv(x, weight.stored, None, TUNING, scales=weight.scales)
    # A weight of zero multiplies infinity to NaN.
    assert not product.isfinite().any()


def test_a_weight_in_float32_is_not_rounded() -> None:
    x = torch.randn(1, 200).to(DEVICE, torch.bfloat16)
    weight = torch.randn(13, 200, device=DEVICE)
    tuning = default_gemv_tuning(weight, is_gated=False)
    assert tuning is not None
    product = gemv(x, weight, None, tuning)
    assert product.dtype == torch.float32
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-4)


def test_rows_that_vectors_do_not_divide_have_no_tuning() -> None:
    assert default_gemv_tuning(torch.empty(8, 20, dtype=torch.bfloat16), is_gated=False) is None


def test_a_vocabulary_has_no_tuning() -> None:
    weight = torch.empty(128256, 8, dtype=torch.bfloat16)
    assert default_gemv_tuning(weight, is_gated=False) is None


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


def assert_near_of_the_norm(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype
) -> None:
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
    assert_near_of_the_norm(product, exact, dtype)
    assert_near_of_the_norm(product, gemv(written_norm(row), weight, bias, TUNING), dtype)
    gate, other = functional.linear(exact_norm(row), weight.double()).chunk(2, 1)
    gated = normed_gemv_gated(row, weight, "silu", TUNING)
    assert_near_of_the_norm(gated, functional.silu(gate) * other, dtype)
    assert_near_of_the_norm(gated, gemv_gated(written_norm(row), weight, "silu", TUNING), dtype)
    assert torch.equal(row.stream, kept)


def test_inputs_are_rounded_as_a_norm_that_is_written() -> None:
    row = unnormed(1024, torch.bfloat16, torch.bfloat16, 1e-5)
    weight = (random(64, 1024, dtype=torch.bfloat16) / 32).to(DEVICE)
    found = normed_gemv(row, weight, None, TUNING)
    expected = gemv(written_norm(row), weight, None, TUNING)
    # The sum of squares has another order, so that an element may round to its other neighbor.
    assert (found == expected).double().mean() > 0.9


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_some_columns_are_convolved(width: int, has_bias: bool) -> None:
    row = unnormed(640, torch.float32, torch.float32, 1e-6)
    weight = (random(13, 640, dtype=torch.float32) / 25).to(DEVICE)
    product = normed_gemv(row, weight, None, TUNING)
    conv = RowConv(
        first_column=3,
        weight=random(7, width, dtype=torch.float32).to(DEVICE),
        bias=random(7, dtype=torch.float32).to(DEVICE) if has_bias else None,
        states=random(4, width - 1, 7, dtype=torch.float32).to(DEVICE)[:3],
        rows=torch.tensor([1], dtype=torch.int32, device=DEVICE),
    )
    states = conv.states.cpu().clone()
    segments = Segments(
        query_starts=torch.arange(2, dtype=torch.int32), rows=conv.rows.cpu(), max_query_len=1
    )
    inner, taps = product[:, 3:10].cpu(), conv.weight.cpu()
    bias = None if conv.bias is None else conv.bias.cpu()
    expected = product.clone()
    expected[:, 3:10] = causal_conv(inner, taps, bias, states, segments, "silu").to(DEVICE)
    found = normed_gemv(row, weight, None, TUNING, conv)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(conv.states.cpu(), states)
    conv.rows.fill_(-1)
    normed_gemv(row, weight, None, TUNING, conv)
    torch.testing.assert_close(conv.states.cpu(), states)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [600, 1024])
def test_the_norm_is_written_beside_the_product(size: int, weight_dtype: torch.dtype) -> None:
    row = unnormed(size, torch.bfloat16, torch.float32, 1e-6)
    weight = (random(9, size, dtype=weight_dtype) / 25).to(DEVICE)
    normed = torch.empty_like(row.stream)
    product = normed_gemv(row, weight, None, TUNING, normed=normed)
    assert_near_of_the_norm(normed, exact_norm(row), torch.bfloat16)
    assert torch.equal(product, gemv(normed, weight, None, TUNING))
    assert product.dtype == weight_dtype


def test_a_weight_of_the_norm_may_be_float32() -> None:
    row = unnormed(640, torch.bfloat16, torch.float32, 1e-6)
    weight = (random(8, 640, dtype=torch.bfloat16) / 25).to(DEVICE)
    exact = functional.linear(exact_norm(row), weight.double())
    assert_near_of_the_norm(normed_gemv(row, weight, None, TUNING), exact, torch.bfloat16)


@pytest.mark.parametrize("is_gated", [False, True])
def test_default_tuning_of_the_norm_computes_the_same(*, is_gated: bool) -> None:
    row = unnormed(1152, torch.bfloat16, torch.bfloat16, 1e-6)
    weight = (random(8, 1152, dtype=torch.bfloat16) / 34).to(DEVICE)
    tuning = default_gemv_tuning(weight, is_gated=is_gated)
    assert tuning is not None
    exact = functional.linear(exact_norm(row), weight.double())
    if is_gated:
        gate, other = exact.chunk(2, 1)
        found = normed_gemv_gated(row, weight, "silu", tuning)
        assert_near_of_the_norm(found, functional.silu(gate) * other, torch.bfloat16)
    else:
        assert_near_of_the_norm(normed_gemv(row, weight, None, tuning), exact, torch.bfloat16)


# Numpy, by which the interpreter computes, warns.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_not_hidden_by_the_norm(value: float) -> None:
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
    assert_near_of_the_norm(stream[:, :out_size], exact, dtype)
