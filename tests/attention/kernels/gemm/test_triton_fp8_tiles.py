"""GEMMs of fp8 rows in small tiles, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.quantized_rows import QuantizedRows
from attention.kernels.triton.gemm.fp8_tiles import fp8_tiles_gemm, takes_one_turn
from tests.attention.kernels.kernel_device import DEVICE
from workers.layers.formats.fp8_rows import quantized_rows


def quantized(num_rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantized_rows(torch.randn(num_rows, size))
    return values.to(DEVICE), scales.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "size", "in_size"), [(128, 64, 128), (150, 200, 272), (1, 16, 16)]
)
def test_product_equals_that_of_float64(
    num_rows: int, size: int, in_size: int, dtype: torch.dtype
) -> None:
    values, row_scales = quantized(num_rows, in_size)
    weight, scales = quantized(size, in_size)
    product = fp8_tiles_gemm(QuantizedRows(values, row_scales, dtype), weight, scales)
    assert product.dtype == dtype
    exact = functional.linear(
        values.double() * row_scales.double(), weight.double() * scales.double()
    )
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    if DEVICE == "cuda":
        # The tensor cores add products of fp8 numbers with some 14 bits.
        tolerance = 2e-2
    torch.testing.assert_close(product.double(), exact, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(
    ("num_rows", "out_size", "is_used"),
    [
        # On an H200: the output projection and the last product of the MLP of Llama 3 8B.
        (256, 4096, True),
        (216, 4096, True),
        (192, 4096, False),
        (272, 4096, False),
        (128, 4096, False),
        # Other products of Llama 3 8B.
        (256, 6144, False),
        (256, 28672, False),
        (8192, 4096, False),
    ],
)
def test_it_is_used_where_one_turn_keeps_an_h200_busy(
    num_rows: int, out_size: int, is_used: bool
) -> None:
    assert takes_one_turn(num_rows, out_size, 132) == is_used
