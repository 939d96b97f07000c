"""One iteration of the product of a tile of rows with the weight of an expert, plain or in mxfp4.

For mxfp4 the accumulator is transposed. Weights are then the left operand of the tensor cores,
which may be in registers, where the weights are unpacked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.gemm.narrow_products import e2m1_numbers

__all__ = ["add_product", "rows_and_columns", "tile_inputs", "zero_sums"]

# The exponent and mantissa bits of e2m1 become the lowest exponent bits and the highest mantissa
# bit of a bfloat16. Its product with 2**126, the difference of the exponent biases, is the number.
_UNPACK_MXFP4 = tl.constexpr(
    """
    {
    .reg .b32 t, u, p, q, factor;
    mov.b32 factor, 0x7E807E80;
    shl.b32 t, $4, 12;
    shr.u32 u, t, 6;
    and.b32 u, u, 0x01C001C0;
    lop3.b32 p, t, 0x80008000, u, 0xEA;
    mul.rn.bf16x2 p, p, factor;
    shl.b32 t, $4, 4;
    shr.u32 u, t, 6;
    and.b32 u, u, 0x01C001C0;
    lop3.b32 q, t, 0x80008000, u, 0xEA;
    mul.rn.bf16x2 q, q, factor;
    prmt.b32 $0, p, q, 0x5410;
    prmt.b32 $1, p, q, 0x7632;
    shl.b32 t, $4, 8;
    shr.u32 u, t, 6;
    and.b32 u, u, 0x01C001C0;
    lop3.b32 p, t, 0x80008000, u, 0xEA;
    mul.rn.bf16x2 p, p, factor;
    shr.u32 u, $4, 6;
    and.b32 u, u, 0x01C001C0;
    lop3.b32 q, $4, 0x80008000, u, 0xEA;
    mul.rn.bf16x2 q, q, factor;
    prmt.b32 $2, p, q, 0x5410;
    prmt.b32 $3, p, q, 0x7632;
    }
    """
)


@triton.jit
def zero_sums(
    tile_pairs: tl.constexpr, tile_columns: tl.constexpr, is_mxfp4: tl.constexpr
) -> tl.tensor:
    """Return the accumulator of a tile before the first iteration, zeros in float32."""
    if is_mxfp4:
        sums = tl.zeros((tile_columns, tile_pairs), dtype=tl.float32)
    else:
        sums = tl.zeros((tile_pairs, tile_columns), dtype=tl.float32)
    return sums


@triton.jit
def rows_and_columns(sums: tl.tensor, is_mxfp4: tl.constexpr) -> tl.tensor:
    """Return the accumulator after the last iteration as `[rows, columns]`."""
    if is_mxfp4:
        sums = tl.trans(sums)
    return sums


@triton.jit
def tile_inputs(
    x: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    first: tl.tensor,
    in_size: tl.constexpr,
    operand_type: tl.constexpr,
    is_mxfp4: tl.constexpr,
    half: tl.constexpr,
    tile_depth: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the `tile_depth` elements from `first` on of some rows, twice.

    In mxfp4 `tile_depth` is `2 * half`, and the halves are `[half, rows]`. Pointer: x, with rows
    that begin at `rows`.
    """
    if is_mxfp4:
        depth = first + tl.arange(0, half)
        lower = tl.load(
            x + rows[None, :] + depth[:, None],
            mask=is_row[None, :] & (depth < in_size)[:, None],
            other=0.0,
        ).to(operand_type)
        depth += half
        upper = tl.load(
            x + rows[None, :] + depth[:, None],
            mask=is_row[None, :] & (depth < in_size)[:, None],
            other=0.0,
        ).to(operand_type)
    else:
        depth = first + tl.arange(0, tile_depth)
        is_deep = (depth < in_size) | (in_size % tile_depth == 0)
        lower = tl.load(
            x + rows[:, None] + depth[None, :],
            mask=is_row[:, None] & is_deep[None, :],
            other=0.0,
        ).to(operand_type)
        upper = lower
    return lower, upper


@triton.jit
def add_product(
    sums: tl.tensor,
    lower: tl.tensor,
    upper: tl.tensor,
    matrix: tl.tensor,
    scales: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    first: tl.tensor,
    in_size: tl.constexpr,
    row_size: tl.constexpr,
    num_columns: tl.constexpr,
    is_mxfp4: tl.constexpr,
    unpacks: tl.constexpr,
    half: tl.constexpr,
    tile_depth: tl.constexpr,
) -> tl.tensor:
    """Return the sums of a tile after the elements from `first` on, which `tile_inputs` returned.

    Pointers: matrix `[num_columns, row_size]`; in mxfp4 bytes of `packed_mxfp4`, and scales
    `[in_size / half, num_columns]`, exponents of two with a bias of 127.
    """
    if is_mxfp4:
        places = first // 2 + tl.arange(0, half)
        numbers = tl.load(
            matrix + columns[:, None] * row_size + places[None, :],
            mask=is_column[:, None],
            other=0,
        )
        exponents = scales + first // half * num_columns + columns
        is_upper = first + half < in_size
        low_exponent = tl.load(exponents, mask=is_column, other=0)
        high_exponent = tl.load(exponents + num_columns, mask=is_column & is_upper, other=0)
        if unpacks:
            low, high = tl.inline_asm_elementwise(
                _UNPACK_MXFP4,
                "=&r,=&r,=&r,=&r,r",
                [numbers],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
            # Exact: a significand of two bits times a power of two.
            low *= (low_exponent.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)[:, None]
            high *= (high_exponent.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)[:, None]
        else:
            low, high = e2m1_numbers(numbers & 15), e2m1_numbers(numbers >> 4)
            low *= (low_exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]
            high *= (high_exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]
        sums = tl.dot(low, lower, acc=sums, input_precision="ieee")
        sums = tl.dot(high, upper, acc=sums, input_precision="ieee")
    else:
        depth = first + tl.arange(0, tile_depth)
        is_deep = (depth < in_size) | (in_size % tile_depth == 0)
        block = tl.load(
            matrix + columns[None, :] * in_size + depth[:, None],
            mask=is_deep[:, None] & is_column[None, :],
            other=0.0,
        )
        sums = tl.dot(lower, block.to(lower.dtype), acc=sums, input_precision="ieee")
    return sums
