"""GEMMs with int4 weights, which are unpacked in registers.

A weight is `(number - zero) * scale`. Each group of inputs of an output column has one zero and one
scale, which share a word. The tensor cores multiply inputs by `number - zero`, and the sum of a
group is multiplied by its scale. The two numbers in a byte belong to inputs that are half a tile
apart, so a tile of bytes unpacks to two tiles of weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.triton.gated_activation import rounded_gate
from attention.kernels.triton.gemm.row_product import scale_and_zero
from attention.kernels.triton.kernel_launcher import can_depend, launch_options, wait_for_inputs
from attention.kernels.triton.tuning import dot_type, next_power_of_two

__all__ = [
    "MAX_GATED_ROWS",
    "MAX_ROWS",
    "dequantize_int4",
    "half_tile",
    "int4_gated",
    "int4_gemm",
    "packed_int4",
    "scale_words",
]

MAX_ROWS = 64
"""Maximum number of rows; for more, it is faster to dequantize the weight and use cuBLAS."""
MAX_GATED_ROWS = 16
"""Maximum number of rows with a gate: two accumulators need twice the registers."""
_MAX_HALF = 128
_ZERO_BITS = 0xFF
_TILE_COLUMNS = 32
_DEQUANTIZED_COLUMNS = 32

# A number of four bits is placed in the lowest mantissa bits of the bfloat16 128, which adds it to
# 128 without a conversion (Kim et al., "Who Says Elephants Can't Run", 2022).
_BASE = tl.constexpr(128.0)
_UNPACK_INT4 = tl.constexpr(
    """
    {
    .reg .b32 first, second, low, high;
    prmt.b32 first, $4, 0, 0x4140;
    prmt.b32 second, $4, 0, 0x4342;
    and.b32 low, first, 0x000F000F;
    or.b32 $0, low, 0x43004300;
    and.b32 low, second, 0x000F000F;
    or.b32 $1, low, 0x43004300;
    shr.u32 first, first, 4;
    shr.u32 second, second, 4;
    and.b32 high, first, 0x000F000F;
    or.b32 $2, high, 0x43004300;
    and.b32 high, second, 0x000F000F;
    or.b32 $3, high, 0x43004300;
    }
    """
)


def packed_int4(numbers: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return numbers `[out_size, in_size]` uint8 as `[out_size, in_size / 2]`, for the kernels."""
    half = half_tile(numbers.shape[1], group_size)
    low, high = numbers.view(len(numbers), -1, 2, half).unbind(2)
    return (low | high << 4).reshape(len(numbers), -1)


def scale_words(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return scales and zeros, `[out_size, groups]`, as int32 `[groups, out_size]`.

    The zero replaces the lowest eight bits of the float32 scale, which are zero if the checkpoint
    stores scales in bfloat16 or float16.
    """
    words = scales.float().view(torch.int32) & ~_ZERO_BITS | zeros.int()
    return words.t().contiguous()


def half_tile(in_size: int, group_size: int) -> int:
    """Return how far apart the two inputs of a byte are: a group's, at most, and all in whole."""
    half = min(_MAX_HALF, group_size & -group_size)
    while in_size % (2 * half):
        half //= 2
    assert half >= 16
    return half


@triton.jit
def _halves(tile: tl.tensor, operand_type: tl.constexpr, unpacks: tl.constexpr) -> tl.tensor:
    """Return the lower and upper numbers of bytes, plus `_BASE` if `unpacks`, then in bfloat16."""
    if unpacks:
        low, high = tl.inline_asm_elementwise(
            _UNPACK_INT4,
            "=&r,=&r,=&r,=&r,r",
            [tile],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = (tile & 15).to(operand_type)
        high = (tile >> 4).to(operand_type)
    return low, high


@triton.jit
def _with_half(
    sums: tl.tensor,
    numbers: tl.tensor,
    x: tl.tensor,
    words: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    column: tl.tensor,
    first: tl.tensor,
    x_stride: tl.tensor,
    num_columns: tl.tensor,
    group_size: tl.constexpr,
    half: tl.constexpr,
    operand_type: tl.constexpr,
    unpacks: tl.constexpr,
) -> tl.tensor:
    """Return `sums` plus the product of `half` inputs from `first` on with their weights."""
    elements = first + tl.arange(0, half)
    inputs = tl.load(
        x + rows[None, :] * x_stride + elements[:, None], mask=is_row[None, :], other=0.0
    ).to(operand_type)
    word = tl.load(words + first // group_size * num_columns + column)
    scale, zero = scale_and_zero(word)
    if unpacks:
        zero += _BASE
    # Integers below 256 are exact in bfloat16.
    weights = numbers - zero.to(operand_type)[:, None]
    return sums + tl.dot(weights, inputs, input_precision="ieee") * scale[:, None]


@triton.jit
def _multiply_int4(
    x: tl.tensor,
    weight: tl.tensor,
    words: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    group_size: tl.constexpr,
    half: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    kind: tl.constexpr,
    operand_type: tl.constexpr,
    unpacks: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """Write `tile_columns` output columns of all rows.

    Launched by `int4_gemm` and `int4_gated`; grid `(tiles of columns,)`. Pointers: x
    `[num_rows, in_size]`; weight `[out_size, in_size / 2]` uint8, or twice as many rows if it is
    gated; words of `scale_words`; bias `[out_size]`; out `[num_rows, out_size]`.
    """
    num_columns = out_size * 2 if is_gated else out_size
    wait_for_inputs(is_dependent)
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    # Columns past the end repeat earlier columns, and are not stored.
    read = tl.minimum(columns, out_size - 1)
    rows = tl.arange(0, tile_rows)
    is_row = rows < num_rows
    sums = tl.zeros([tile_columns, tile_rows], tl.float32)
    other = tl.zeros([tile_columns, tile_rows], tl.float32)
    bytes = tl.arange(0, half)
    for first in range(0, in_size, 2 * half):
        places = weight + (first // 2 + bytes)[None, :]
        # Every weight is read once a step.
        tile = tl.load(
            places + read.to(tl.int64)[:, None] * (in_size // 2), eviction_policy="evict_first"
        )
        low, high = _halves(tile, operand_type, unpacks)
        for side in tl.static_range(2):
            sums = _with_half(
                sums, high if side else low, x, words, rows, is_row, read, first + side * half,
                x_stride, num_columns, group_size, half, operand_type, unpacks,
            )  # fmt: skip
        if is_gated:
            tile = tl.load(
                places + (read + out_size).to(tl.int64)[:, None] * (in_size // 2),
                eviction_policy="evict_first",
            )
            low, high = _halves(tile, operand_type, unpacks)
            for side in tl.static_range(2):
                other = _with_half(
                    other, high if side else low, x, words, rows, is_row, read + out_size,
                    first + side * half, x_stride, num_columns, group_size, half, operand_type,
                    unpacks,
                )  # fmt: skip
    if has_bias:
        sums += tl.load(bias + read).to(tl.float32)[:, None]
    element_type = out.dtype.element_ty
    if is_gated:
        sums = rounded_gate(sums, other, kind, element_type)
    tl.store(
        out + rows[None, :] * out_size + columns[:, None],
        sums.to(element_type),
        mask=is_row[None, :] & (columns < out_size)[:, None],
    )


@triton.jit
def _dequantize(
    weight: tl.tensor,
    words: tl.tensor,
    out: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    group_size: tl.constexpr,
    half: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """Write the weights of a tile of bytes.

    Launched by `dequantize_int4`; grid `(tiles of columns, tiles of inputs)`. Pointers as in
    `_multiply_int4`; out `[out_size, in_size]`.
    """
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    is_column = (columns < out_size)[:, None]
    column = tl.minimum(columns, out_size - 1).to(tl.int64)
    first = tl.program_id(1) * 2 * half
    bytes = tl.arange(0, half)
    tile = tl.load(weight + column[:, None] * (in_size // 2) + (first // 2 + bytes)[None, :])
    for side in tl.static_range(2):
        start = first + side * half
        scale, zero = scale_and_zero(tl.load(words + start // group_size * out_size + column))
        numbers = ((tile >> 4) if side else (tile & 15)).to(tl.float32)
        values = (numbers - zero[:, None]) * scale[:, None]
        places = out + column[:, None] * in_size + (start + bytes)[None, :]
        tl.store(places, values.to(out.dtype.element_ty), mask=is_column)


def int4_gemm(
    x: torch.Tensor, weight: torch.Tensor, words: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, `[num_rows, out_size]`, for at most `MAX_ROWS` rows.

    `weight` comes from `packed_int4`, and `words` from `scale_words`.
    """
    return _launched(x, weight, words, bias, len(weight), kind=None)


def int4_gated(
    x: torch.Tensor, weight: torch.Tensor, words: torch.Tensor, kind: str
) -> torch.Tensor:
    """Return `activation(first half of the columns) * second half` of `x @ weight.T`.

    Takes the arguments of `int4_gemm`; the result is `[num_rows, out_size / 2]`.
    """
    return _launched(x, weight, words, None, len(weight) // 2, kind=kind)


def dequantize_int4(weight: torch.Tensor, words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight, `[out_size, in_size]`; takes the arguments of `int4_gemm`."""
    out_size, in_size = len(weight), 2 * weight.shape[1]
    num_groups = len(words)
    half = half_tile(in_size, in_size // num_groups)
    out = torch.empty((out_size, in_size), dtype=dtype, device=weight.device)
    _dequantize[(triton.cdiv(out_size, _DEQUANTIZED_COLUMNS), in_size // (2 * half))](
        weight,
        words,
        out,
        out_size,
        in_size,
        group_size=in_size // num_groups,
        half=half,
        tile_columns=_DEQUANTIZED_COLUMNS,
        num_warps=4,
    )
    return out


def _launched(
    x: torch.Tensor,
    weight: torch.Tensor,
    words: torch.Tensor,
    bias: torch.Tensor | None,
    out_size: int,
    *,
    kind: str | None,
) -> torch.Tensor:
    num_rows, in_size = x.shape
    num_groups = len(words)
    assert num_rows <= (MAX_ROWS if kind is None else MAX_GATED_ROWS)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert weight.shape[1] * 2 == in_size
    assert words.shape[1] == len(weight)
    assert words.is_contiguous()
    out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    # Triton's interpreter, which runs kernels on the CPU, cannot run assembly.
    unpacks = x.dtype == torch.bfloat16 and x.is_cuda
    if num_rows:
        _multiply_int4[(triton.cdiv(out_size, _TILE_COLUMNS),)](
            x,
            weight,
            words,
            weight if bias is None else bias,
            out,
            num_rows,
            out_size,
            in_size,
            x.stride(0),
            group_size=in_size // num_groups,
            half=half_tile(in_size, in_size // num_groups),
            has_bias=bias is not None,
            is_gated=kind is not None,
            kind=kind,
            operand_type=dot_type(x),
            unpacks=unpacks,
            is_dependent=can_depend(x.device),
            tile_rows=max(16, next_power_of_two(num_rows)),
            tile_columns=_TILE_COLUMNS,
            num_warps=4,
            num_stages=6 if kind is None else 4,
            **launch_options(x.device),
        )
    return out
