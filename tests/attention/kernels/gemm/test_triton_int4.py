"""Products with int4 weights, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from attention.kernels.triton.gemm.int4 import (
    MAX_ROWS,
    dequantize_int4,
    int4_gated,
    int4_gemm,
    packed_int4,
    scale_words,
)
from tests.attention.kernels.kernel_device import DEVICE

Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def int4_weight(out_size: int, in_size: int, group_size: int) -> Weight:
    """Return packed numbers, words of scales, and in float64 what they stand for."""
    numbers = torch.randint(0, 16, (out_size, in_size), dtype=torch.uint8)
    scales = (torch.rand(out_size, in_size // group_size) / 8).half()
    zeros = torch.randint(0, 17, scales.shape, dtype=torch.uint8)
    spread = (tensor.double().repeat_interleave(group_size, 1) for tensor in (zeros, scales))
    zero, scale = spread
    exact = (numbers.double() - zero) * scale
    packed = packed_int4(numbers, group_size)
    return packed.to(DEVICE), scale_words(scales, zeros).to(DEVICE), exact.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 17, MAX_ROWS])
@pytest.mark.parametrize(("in_size", "group_size"), [(256, 32), (192, 192)])
def test_product_equals_that_of_dequantized_weights(
    in_size: int, group_size: int, num_rows: int, dtype: torch.dtype
) -> None:
    packed, words, exact = int4_weight(40, in_size, group_size)
    x = torch.randn(num_rows, in_size + 16).to(dtype).to(DEVICE)[:, :in_size]
    bias = torch.randn(40).to(dtype).to(DEVICE)
    expected = functional.linear(x.double(), exact)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for given, added in ((None, 0.0), (bias, bias.double())):
        found = int4_gemm(x, packed, words, given)
        torch.testing.assert_close(
            found.double(), expected + added, rtol=tolerance, atol=10 * tolerance
        )


def test_both_halves_of_a_gate_have_their_groups() -> None:
    packed, words, exact = int4_weight(48, 512, 128)
    x = torch.randn(3, 512, device=DEVICE)
    gate, other = functional.linear(x.double(), exact).chunk(2, 1)
    found = int4_gated(x, packed, words, "silu")
    torch.testing.assert_close(found.double(), functional.silu(gate) * other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("in_size", "group_size"), [(256, 32), (96, 96), (512, 256)])
def test_all_weights_are_dequantized(in_size: int, group_size: int) -> None:
    packed, words, exact = int4_weight(40, in_size, group_size)
    found = dequantize_int4(packed, words, torch.float32)
    torch.testing.assert_close(found, exact.float(), rtol=1e-6, atol=1e-6)
