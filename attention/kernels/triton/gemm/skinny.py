"""GEMMs of a few rows, `x @ weight.T`, at memory bandwidth.

A program reads all weights of a few output columns, so one launch without split-K suffices, and the
gate of an MLP can be applied in the same kernel. For one row, `gemv.py` is faster.

Microseconds of a decode step of Llama 3 8B in bfloat16 on an H200, with cuBLAS and with these
kernels: 8 rows 4851 and 4701, 16 rows 4937 and 4755 (`python -m bench.account --case 8 --case 16`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.triton.gated_activation import rounded_gate
from attention.kernels.triton.tuning import dot_type

__all__ = [
    "MAX_ROWS",
    "SkinnyGemmTuning",
    "default_skinny_tuning",
    "fp8_skinny_tuning",
    "skinny_gated",
    "skinny_gemm",
]

MAX_ROWS = 16
"""Maximum number of rows: the columns of one tile of the tensor cores."""
_MAX_OUT_SIZE = 65536
"""For larger outputs, such as the vocabulary, cuBLAS also runs at memory bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyGemmTuning:
    """How the work is tiled."""

    tile_columns: int
    """Output columns of a program, a power of two from 16."""
    tile_depth: int
    """Elements of each column per iteration, a power of two from 16 that divides the depth."""
    num_warps: int
    num_stages: int
    """Stages of the software pipeline: iterations with weights in flight."""


def default_skinny_tuning(
    out_size: int, in_size: int, *, is_gated: bool
) -> SkinnyGemmTuning | None:
    """Return the tuning for a weight of this shape, or None if cuBLAS is as fast.

    With a gate, a program reads the weights of two columns for each that it writes.
    """
    if out_size > _MAX_OUT_SIZE or in_size % 256:
        return None
    num_warps, num_stages = (2, 3) if is_gated else (4, 6)
    return SkinnyGemmTuning(
        tile_columns=32, tile_depth=256, num_warps=num_warps, num_stages=num_stages
    )


def fp8_skinny_tuning(
    out_size: int, in_size: int, scale_depth: int, *, is_gated: bool
) -> SkinnyGemmTuning | None:
    """Return the tuning for a weight in fp8, or None if there is none for this shape.

    `scale_depth` inputs have a scale in common.
    """
    tile_depth = min(256, scale_depth)
    if out_size > _MAX_OUT_SIZE or in_size % scale_depth or scale_depth % tile_depth:
        return None
    if tile_depth % 64 or tile_depth & (tile_depth - 1):
        return None
    num_warps, num_stages = (2, 5) if is_gated else (4, 8)
    return SkinnyGemmTuning(
        tile_columns=32, tile_depth=tile_depth, num_warps=num_warps, num_stages=num_stages
    )


@triton.jit
def _weight_tile(
    weight: tl.tensor, columns: tl.tensor, first: tl.tensor, in_size: tl.tensor, depth: tl.constexpr
) -> tl.tensor:
    """Return `depth` elements from `first` of some columns' weights, `[columns, depth]`."""
    elements = first + tl.arange(0, depth)
    # Each weight is read once per step, so it need not stay in the cache.
    return tl.load(
        weight + columns.to(tl.int64)[:, None] * in_size + elements[None, :],
        eviction_policy="evict_first",
    )


@triton.jit
def _input_tile(
    x: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    first: tl.tensor,
    x_stride: tl.tensor,
    depth: tl.constexpr,
) -> tl.tensor:
    """Return `depth` elements of each row, beginning with element `first`, `[depth, rows]`."""
    elements = first + tl.arange(0, depth)
    return tl.load(
        x + rows[None, :] * x_stride + elements[:, None], mask=is_row[None, :], other=0.0
    )


# Unpacks four fp8 numbers of one register to bfloat16 in two. Exponent and mantissa bits are
# shifted to their places, which divides by 2**120, the difference of the exponent biases. The
# compiler would convert by way of float32, which takes longer than loading the weights.
_UNPACK_FP8 = tl.constexpr(
    """
    {
    .reg .b32 low, high, low_sign, high_sign, factor;
    prmt.b32 low_sign, $2, 0, 0x1404;
    prmt.b32 high_sign, $2, 0, 0x3424;
    shr.u32 low, low_sign, 4;
    shr.u32 high, high_sign, 4;
    and.b32 low, low, 0x07F007F0;
    and.b32 high, high, 0x07F007F0;
    and.b32 low_sign, low_sign, 0x80008000;
    and.b32 high_sign, high_sign, 0x80008000;
    or.b32 low, low, low_sign;
    or.b32 high, high, high_sign;
    mov.b32 factor, 0x7B807B80;
    mul.rn.bf16x2 $0, low, factor;
    mul.rn.bf16x2 $1, high, factor;
    }
    """
)


@triton.jit
def _operand(tile: tl.tensor, operand_type: tl.constexpr, unpacks: tl.constexpr) -> tl.tensor:
    """Return weights as operands of the tensor cores; `unpacks` says whether they are fp8."""
    if unpacks:
        return tl.inline_asm_elementwise(
            _UNPACK_FP8,
            "=r,=r,r",
            [tile.to(tl.uint8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return tile.to(operand_type)


@triton.jit
def _with_product(
    sums: tl.tensor,
    tile: tl.tensor,
    inputs: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    num_scales: tl.constexpr,
    scale_depth: tl.constexpr,
    operand_type: tl.constexpr,
    unpacks: tl.constexpr,
) -> tl.tensor:
    """Return `sums` plus the product of a tile of weights, from input `first` on, with `inputs`."""
    weights = _operand(tile, operand_type, unpacks)
    if num_scales > 1:
        scale = tl.load(scales + row * num_scales + first // scale_depth)
        return sums + tl.dot(weights, inputs, input_precision="ieee") * scale[:, None]
    return tl.dot(weights, inputs, sums, input_precision="ieee")


@triton.jit
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    num_scales: tl.constexpr,
    scale_depth: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    kind: tl.constexpr,
    operand_type: tl.constexpr,
    unpacks: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
) -> None:
    """Write `tile_columns` output columns of all rows.

    Launched by `skinny_gemm` and `skinny_gated`; grid `(tiles of columns,)`. Pointers: x
    `[num_rows, in_size]`; weight `[out_size, in_size]`, or twice as many rows if it is gated;
    scales float32, `num_scales` of each of its rows; bias `[out_size]`; out
    `[num_rows, out_size]`.
    """
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    # Columns past the end repeat earlier columns, and are not stored.
    read = tl.minimum(columns, out_size - 1)
    rows = tl.arange(0, tile_rows)
    is_row = rows < num_rows
    product = tl.zeros([tile_columns, tile_rows], tl.float32)
    other = tl.zeros([tile_columns, tile_rows], tl.float32)
    for first in range(0, in_size, tile_depth):
        inputs = _input_tile(x, rows, is_row, first, x_stride, tile_depth).to(operand_type)
        tile = _weight_tile(weight, read, first, in_size, tile_depth)
        product = _with_product(
            product, tile, inputs, scales, read, first, num_scales, scale_depth, operand_type,
            unpacks,
        )  # fmt: skip
        if is_gated:
            tile = _weight_tile(weight, read + out_size, first, in_size, tile_depth)
            other = _with_product(
                other, tile, inputs, scales, read + out_size, first, num_scales, scale_depth,
                operand_type, unpacks,
            )  # fmt: skip
    if num_scales == 1:
        product *= tl.load(scales + read)[:, None]
        if is_gated:
            other *= tl.load(scales + read + out_size)[:, None]
    if has_bias:
        product += tl.load(bias + read).to(tl.float32)[:, None]
    element_type = out.dtype.element_ty
    if is_gated:
        product = rounded_gate(product, other, kind, element_type)
    tl.store(
        out + rows[None, :] * out_size + columns[:, None],
        product.to(element_type),
        mask=is_row[None, :] & (columns < out_size)[:, None],
    )


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tuning: SkinnyGemmTuning,
    *,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, `[num_rows, out_size]`, for at most `MAX_ROWS` rows.

    `weight` is `[out_size, in_size]` and contiguous; `tuning.tile_depth` divides `in_size`. A
    weight in float8_e4m3fn has `scales`, `[out_size, 1]` float32, or a scale for each block of
    inputs; `tuning.tile_depth` divides the depth of a block.
    """
    return _launched(x, weight, scales, bias, len(weight), tuning, kind=None)


def skinny_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
    tuning: SkinnyGemmTuning,
    *,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `activation(first half of the columns) * second half` of `x @ weight.T`.

    Takes the arguments of `skinny_gemm`; the result is `[num_rows, out_size / 2]`.
    """
    return _launched(x, weight, scales, None, len(weight) // 2, tuning, kind=kind)


def _launched(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_size: int,
    tuning: SkinnyGemmTuning,
    *,
    kind: str | None,
) -> torch.Tensor:
    num_rows, in_size = x.shape
    assert num_rows <= MAX_ROWS
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert weight.shape[1] == in_size
    assert (weight.dtype == torch.float8_e4m3fn) == (scales is not None)
    assert in_size % tuning.tile_depth == 0
    num_scales = 0 if scales is None else scales.shape[1]
    assert num_scales == 0 or in_size % (num_scales * tuning.tile_depth) == 0
    out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    if num_rows:
        _multiply[(triton.cdiv(out_size, tuning.tile_columns),)](
            x,
            weight,
            weight if scales is None else scales,
            weight if bias is None else bias,
            out,
            num_rows,
            out_size,
            in_size,
            x.stride(0),
            num_scales=num_scales,
            scale_depth=in_size // max(1, num_scales),
            has_bias=bias is not None,
            is_gated=kind is not None,
            kind=kind,
            operand_type=dot_type(x),
            # The interpreter has no inline assembly.
            unpacks=scales is not None and x.dtype == torch.bfloat16 and x.is_cuda,
            tile_rows=MAX_ROWS,
            tile_columns=tuning.tile_columns,
            tile_depth=tuning.tile_depth,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
        )
    return out
