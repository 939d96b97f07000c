"""GEMMs of many rows in float8_e4m3fn with block scales, as in DeepSeek-V3 (2024).

Inputs and weights have a scale for each block of inputs. The tensor cores sum the products of a
block, and each sum is then multiplied by both scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.triton.tuning import next_power_of_two

__all__ = ["block_fp8_gemm"]

_TILE_COLUMNS = 128
_MAX_TILE_ROWS = 64


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_blocks(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    num_blocks: tl.tensor,
    has_bias: tl.constexpr,
    widens: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """Write a tile of the product.

    Launched by `block_fp8_gemm`; grid `(tiles of rows, tiles of columns)`. Pointers: x
    `[num_rows, in_size]`, weight `[out_size, in_size]`, fp8; x_scales `[num_rows, num_blocks]`,
    weight_scales `[out_size, num_blocks]`, float32; bias `[out_size]`; out `[num_rows, out_size]`.
    """
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    # Rows and columns past the end repeat earlier rows and columns, and are not stored.
    row = tl.minimum(rows, num_rows - 1).to(tl.int64)
    column = tl.minimum(columns, out_size - 1).to(tl.int64)
    sums = tl.zeros([tile_rows, tile_columns], tl.float32)
    for block in range(0, num_blocks):
        elements = block * depth + tl.arange(0, depth)
        is_element = elements < in_size
        inputs = tl.load(
            x + row[:, None] * in_size + elements[None, :], mask=is_element[None, :], other=0.0
        )
        weights = tl.load(
            weight + column[None, :] * in_size + elements[:, None],
            mask=is_element[:, None],
            other=0.0,
        )
        if widens:
            inputs, weights = inputs.to(tl.float32), weights.to(tl.float32)
        product = tl.dot(inputs, weights)
        x_scale = tl.load(x_scales + row * num_blocks + block)
        weight_scale = tl.load(weight_scales + column * num_blocks + block)
        sums += product * x_scale[:, None] * weight_scale[None, :]
    if has_bias:
        sums += tl.load(bias + column).to(tl.float32)[None, :]
    places = out + rows.to(tl.int64)[:, None] * out_size + columns[None, :]
    is_inside = (rows < num_rows)[:, None] & (columns < out_size)[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=is_inside)


def block_fp8_gemm(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    depth: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `[num_rows, out_size]` of `dtype` for `[num_rows, in_size]` in float8_e4m3fn.

    `weight` is `[out_size, in_size]`; `depth`, a power of two from 32, inputs of a row of either
    have a scale in common, `[rows, in_size / depth]` float32. All are contiguous.
    """
    num_rows, in_size = x.shape
    out_size = len(weight)
    num_blocks = triton.cdiv(in_size, depth)
    assert x_scales.shape == (num_rows, num_blocks)
    assert weight_scales.shape == (out_size, num_blocks)
    out = torch.empty((num_rows, out_size), dtype=dtype, device=x.device)
    if num_rows:
        tile_rows = min(_MAX_TILE_ROWS, max(16, next_power_of_two(num_rows)))
        _multiply_blocks[(triton.cdiv(num_rows, tile_rows), triton.cdiv(out_size, _TILE_COLUMNS))](
            x,
            x_scales,
            weight,
            weight_scales,
            weight if bias is None else bias,
            out,
            num_rows,
            out_size,
            in_size,
            num_blocks,
            has_bias=bias is not None,
            # Triton's interpreter, which runs kernels on the CPU, cannot multiply fp8.
            widens=not x.is_cuda,
            tile_rows=tile_rows,
            tile_columns=_TILE_COLUMNS,
            depth=depth,
            num_warps=4,
            num_stages=4,
        )
    return out
