"""GEMMs of fp8 rows in one turn, with a small tile of the output for each multiprocessor.

cuBLAS multiplies fp8 rows in tiles of 128 x 128, which leaves half of a GPU idle if there are as
few as 64 of them, for example with 256 rows and a weight of 4096 columns. Tiles of half that width
then take less time, though each loads its rows anew. Microseconds of such a product on one NVIDIA
H100, of 4096 and of 14336 inputs: 12.5 and 33.2, by cuBLAS 13.4 and 38.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.triton.launches.dependent_launch import dependent_launch, wait_for_inputs

if TYPE_CHECKING:
    from attention.kernels.quantized_rows import QuantizedRows

__all__ = ["fp8_tiles_gemm", "takes_one_turn"]

_TILE_ROWS = 128
_TILE_COLUMNS = 64
_TILE_DEPTH = 128
"""Elements of a row per iteration: 128 bytes, the widest swizzle of shared memory."""
_LEAST_BUSY = 0.8
"""The share of what all multiprocessors could compute in one turn that must be stored."""


def takes_one_turn(num_rows: int, out_size: int, num_multiprocessors: int) -> bool:
    """Return whether `fp8_tiles_gemm` takes less time than cuBLAS for this many rows and columns.

    It does if there is a tile for most multiprocessors, and for none of them a second one.
    """
    num_tiles = -(-num_rows // _TILE_ROWS) * -(-out_size // _TILE_COLUMNS)
    num_computed = num_multiprocessors * _TILE_ROWS * _TILE_COLUMNS
    return num_tiles <= num_multiprocessors and num_rows * out_size >= _LEAST_BUSY * num_computed


@triton.jit(do_not_specialize=["num_rows"])
def _tile_gemm(
    rows: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    row_scales: tl.tensor,
    column_scales: tl.tensor,
    num_rows: tl.tensor,
    size: tl.constexpr,
    in_size: tl.constexpr,
    operand_type: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
) -> None:
    """Write one tile of the product.

    Launched by `fp8_tiles_gemm`; grid `(tiles of rows, tiles of columns)`. Descriptors: rows
    `[num_rows, in_size]` and weight `[size, in_size]` in fp8, out `[num_rows, size]`. Pointers:
    row_scales `[num_rows]` and column_scales `[size]`, float32.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0) * tile_rows
    column = tl.program_id(1) * tile_columns
    sums = tl.zeros([tile_rows, tile_columns], tl.float32)
    for element in range(0, in_size, tile_depth):
        inputs = rows.load([row, element]).to(operand_type)
        sums = tl.dot(inputs, weight.load([column, element]).to(operand_type).T, sums)
    places = row + tl.arange(0, tile_rows)
    row_scale = tl.load(row_scales + places, mask=places < num_rows, other=0.0)
    columns = column + tl.arange(0, tile_columns)
    column_scale = tl.load(column_scales + columns, mask=columns < size, other=0.0)
    scaled = sums * row_scale[:, None] * column_scale[None, :]
    out.store([row, column], scaled.to(out.dtype))


def fp8_tiles_gemm(rows: QuantizedRows, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `[num_rows, out_size]` of the dtype of the rows before quantization.

    `weight` is `[out_size, in_size]` in float8_e4m3fn and contiguous, with `scales` `[out_size, 1]`
    float32; `in_size` is a multiple of 16.
    """
    num_rows, in_size = rows.values.shape
    size = len(weight)
    assert rows.values.is_contiguous()
    assert rows.scales.is_contiguous()
    assert weight.is_contiguous()
    assert scales.shape == (size, 1)
    out = torch.empty((num_rows, size), dtype=rows.dtype, device=weight.device)
    _tile_gemm[(-(-num_rows // _TILE_ROWS), -(-size // _TILE_COLUMNS))](
        TensorDescriptor(rows.values, [num_rows, in_size], [in_size, 1], [_TILE_ROWS, _TILE_DEPTH]),
        TensorDescriptor(weight, [size, in_size], [in_size, 1], [_TILE_COLUMNS, _TILE_DEPTH]),
        TensorDescriptor(out, [num_rows, size], [size, 1], [_TILE_ROWS, _TILE_COLUMNS]),
        rows.scales,
        scales,
        num_rows,
        size=size,
        in_size=in_size,
        # Triton's interpreter, which runs kernels on the CPU, cannot multiply fp8.
        operand_type=tl.float8e4nv if weight.is_cuda else tl.float32,
        tile_rows=_TILE_ROWS,
        tile_columns=_TILE_COLUMNS,
        tile_depth=_TILE_DEPTH,
        num_warps=4,
        num_stages=6,
        **dependent_launch(weight.device),
    )
    return out
