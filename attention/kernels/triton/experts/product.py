"""One step of the product of a tile of rows with the weight of an expert, plain or in mxfp4."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_product"]


@triton.jit
def add_product(
    sums: tl.tensor,
    values: tl.tensor,
    matrix: tl.tensor,
    scales: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    first: tl.tensor,
    in_size: tl.constexpr,
    scales_stride: tl.constexpr,
    is_mxfp4: tl.constexpr,
    tile_depth: tl.constexpr,
) -> tl.tensor:
    """Return the sums of `[rows, columns]` after the elements from `first` on, float32.

    `values` are these elements, `[rows, tile_depth]`. Pointers: matrix `[out_size, in_size]`, or in
    mxfp4 `[out_size, in_size / 2]` with two numbers in a byte, the lower bits first; scales
    `[in_size / 32, out_size]` with `scales_stride` elements from row to row, exponents of two with
    a bias of 127.
    """
    if is_mxfp4:
        bytes_size: tl.constexpr = in_size // 2
        blocks_size: tl.constexpr = in_size // 32
        places = first // 2 + tl.arange(0, tile_depth // 2)
        is_place = (places < bytes_size) | (in_size % tile_depth == 0)
        numbers = tl.load(
            matrix + columns[None, :] * bytes_size + places[:, None],
            mask=is_place[:, None] & is_column[None, :],
            other=0,
        )
        blocks = first // 32 + tl.arange(0, tile_depth // 32)
        is_block = (blocks < blocks_size) | (in_size % tile_depth == 0)
        exponents = tl.load(
            scales + blocks[None, :] * scales_stride + columns[:, None],
            mask=is_block[None, :] & is_column[:, None],
            other=127,
        )
        # Loading refuses scales that are not numbers, which is what slow math would look for.
        return tl.dot_scaled(
            values,
            None,
            "fp16" if values.dtype == tl.float16 else "bf16",
            numbers,
            exponents,
            "e2m1",
            sums,
            fast_math=True,
        )
    else:
        depth = first + tl.arange(0, tile_depth)
        is_deep = (depth < in_size) | (in_size % tile_depth == 0)
        block = tl.load(
            matrix + columns[None, :] * in_size + depth[:, None],
            mask=is_deep[:, None] & is_column[None, :],
            other=0.0,
        )
        return tl.dot(values, block.to(values.dtype), acc=sums, input_precision="ieee")
