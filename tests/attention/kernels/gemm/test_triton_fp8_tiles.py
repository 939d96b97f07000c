"""GEMMs of fp8 rows in small tiles, against torch in float64."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import QuantizedRows
from attention.kernels.triton.gemm.fp8_tiles import (
    Fp8Tiling,
    fp8_tiles_gemm,
    fp8_tiling,
    new_arrivals,
)
from tests.attention.kernels.kernel_device import DEVICE
from workers.layers.formats.fp8_weight import quantized_rows


def quantized(num_rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantized_rows(torch.randn(num_rows, size))
    return values.to(DEVICE), scales.to(DEVICE)


def tiling(rows: int, depth: int, parts: int = 1) -> Fp8Tiling:
    return Fp8Tiling(tile_rows=rows, tile_depth=depth, num_stages=3, num_parts=parts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "size", "in_size", "tiling"),
    [
        (128, 64, 128, tiling(128, 128)),
        (150, 200, 272, tiling(128, 128)),
        (150, 200, 272, tiling(64, 256)),
        (1, 16, 16, tiling(64, 128)),
        (17, 80, 272, tiling(32, 256)),
        (31, 144, 512, tiling(32, 128, parts=2)),
        (50, 144, 512, tiling(64, 256, parts=2)),
    ],
)
def test_product_equals_that_of_float64(
    num_rows: int, size: int, in_size: int, tiling: Fp8Tiling, dtype: torch.dtype
) -> None:
    values, row_scales = quantized(num_rows, in_size)
    weight, scales = quantized(size, in_size)
    rows, arrivals = QuantizedRows(values, row_scales, dtype), new_arrivals(size, weight.device)
    # A launch leaves the counters as the next one needs them.
    for _ in range(2):
        product = fp8_tiles_gemm(rows, weight, scales, tiling, arrivals)
    assert product.dtype == dtype
    assert not arrivals.any()
    exact = functional.linear(
        values.double() * row_scales.double(), weight.double() * scales.double()
    )
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    if DEVICE == "cuda":
        # The tensor cores add products of fp8 numbers with some 14 bits.
        tolerance = 2e-2
    torch.testing.assert_close(product.double(), exact, rtol=tolerance, atol=10 * tolerance)


def test_rows_after_the_last_one_do_not_change_the_product() -> None:
    values, row_scales = quantized(128, 256)
    weight, scales = quantized(64, 256)
    # Rows whose memory is followed by other rows, and by numbers that are not finite.
    values.view(torch.uint8)[50:] = 0x7F
    arrivals = new_arrivals(64, weight.device)
    products = [
        fp8_tiles_gemm(
            QuantizedRows(rows, row_scales[:50], torch.bfloat16),
            weight,
            scales,
            tiling(64, 256),
            arrivals,
        )
        for rows in (values[:50], values[:50].clone())
    ]
    assert torch.equal(*products)
    assert products[0].isfinite().all()


def test_a_weight_with_tiles_for_one_turn_and_a_fifth_is_left_to_cublas() -> None:
    # Queries, keys and values of Llama 3 70B.
    assert fp8_tiling(64, 10240, 8192, 132) is None
    assert fp8_tiling(32, 10240, 8192, 132) is not None


LLAMA = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


@pytest.mark.parametrize(
    ("num_rows", "tile_rows", "num_parts"),
    [
        (17, {"qkv": 32, "o": 32, "gate_up": 32, "down": 32}, {"down": 2}),
        (64, {"qkv": 64, "o": 64, "gate_up": 64, "down": 64}, {"down": 2}),
        (72, {"qkv": 128, "o": 64, "down": 64}, {}),
        (128, {"qkv": 128, "o": 64, "down": 64}, {}),
        (192, {"o": 64, "down": 64}, {}),
        (144, {"o": 64, "down": 64}, {}),
        (200, {"o": 128, "down": 128}, {}),
        (256, {"o": 128, "down": 128}, {}),
        (272, {}, {}),
        (8192, {}, {}),
    ],
)
def test_tiles_are_chosen_that_keep_an_h200_busy(
    num_rows: int, tile_rows: dict[str, int], num_parts: dict[str, int]
) -> None:
    found = {name: fp8_tiling(num_rows, *shape, 132) for name, shape in LLAMA.items()}
    assert {name: one.tile_rows for name, one in found.items() if one is not None} == tile_rows
    split = {name: one.num_parts for name, one in found.items() if one and one.num_parts > 1}
    assert split == num_parts
