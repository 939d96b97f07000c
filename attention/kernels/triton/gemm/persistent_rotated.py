"""GEMMs of many rows by persistent programs, which rotate queries and keys before they store.

The programs work like `persistent_gated`. A program applies the rotary embedding to the heads that
it has just computed, so no other kernel reads and writes all heads again. Results had the same bits
as cuBLAS with `rotate_heads`, wherever both were compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.triton.gemm.persistent_tiles import (
    TILE_DEPTH,
    TILE_GROUP,
    TILE_ROWS,
    can_copy_tiles,
    num_tiles,
    stored_share,
    tile_origin,
)
from attention.kernels.triton.kernel_launcher import dependent_launch, wait_for_inputs
from attention.kernels.triton.norm_rope import rotated_pairs
from attention.kernels.triton.tuning import dot_type

if TYPE_CHECKING:
    import torch

    from attention.kernels.arguments import Rotary

__all__ = ["ROTATED_HEAD_SIZE", "persistent_rotated", "rotates_faster"]

ROTATED_HEAD_SIZE = 128
_TILE_COLUMNS = 2 * ROTATED_HEAD_SIZE
_LEAST_BUSY = 0.93
"""Minimum share of computed values that must be stored.

With 3 072 rows and 6 144 columns the share is 0.87, and cuBLAS is faster.
"""


def rotates_faster(
    num_rows: int, weight: torch.Tensor, num_rotated: int, num_programs: int
) -> bool:
    """Return whether `persistent_rotated` takes less time than cuBLAS and `rotate_heads`.

    It does if almost all that the programs compute until the last of them ends is stored.
    """
    share = stored_share(num_rows, len(weight), _TILE_COLUMNS, num_programs)
    return share >= _LEAST_BUSY and num_rotated % _TILE_COLUMNS == 0 and can_copy_tiles(weight)


@triton.jit
def _rotated_head(
    head: tl.tensor, cos: tl.tensor, sin: tl.tensor, tile_rows: tl.constexpr, half: tl.constexpr
) -> tl.tensor:
    """Return `[tile_rows, 2 * half]` elements, rotated; the angles are `[tile_rows, half]`."""
    first, second = tl.split(head.reshape(tile_rows, 2, half).permute(0, 2, 1))
    rotated_first, rotated_second = rotated_pairs(first, second, cos, sin)
    pairs = tl.join(rotated_first, rotated_second).to(head.dtype)
    return pairs.permute(0, 2, 1).reshape(tile_rows, 2 * half)


@triton.jit(do_not_specialize=["num_rows"])
def _rotated_gemm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    num_rows: tl.tensor,
    size: tl.constexpr,
    in_size: tl.constexpr,
    num_rotated: tl.constexpr,
    half: tl.constexpr,
    operand_type: tl.constexpr,
    is_dependent: tl.constexpr,
    num_programs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_depth: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Write every `num_programs`-th tile of the product, two heads wide.

    Launched by `persistent_rotated`; grid `(num_programs,)`. Descriptors: x `[num_rows, in_size]`,
    weight `[size, in_size]`, out `[num_rows, size]`. Pointers: positions `[num_rows]` int64; table
    `[num_positions, 2 * half]` float32, cosines, then sines.
    """
    wait_for_inputs(is_dependent)
    tile_columns: tl.constexpr = 4 * half
    num_down = tl.cdiv(num_rows, tile_rows)
    num_across: tl.constexpr = (size + tile_columns - 1) // tile_columns
    for tile in tl.range(tl.program_id(0), num_down * num_across, num_programs, flatten=True):
        row, column = tile_origin(tile, num_down, num_across, group, tile_rows, tile_columns)
        sums = tl.zeros([tile_rows, tile_columns], tl.float32)
        for element in range(0, in_size, tile_depth):
            inputs = x.load([row, element]).to(operand_type)
            columns = weight.load([column, element]).to(operand_type)
            sums = tl.dot(inputs, columns.T, sums)
        rows = row + tl.arange(0, tile_rows)
        position = tl.load(positions + rows, mask=rows < num_rows, other=0)
        angles = table + position[:, None] * (2 * half) + tl.arange(0, half)[None, :]
        # A branch could not be part of one pipeline with the loop, and values are not rotated.
        is_rotated = column < num_rotated
        cos = tl.load(angles, mask=is_rotated, other=1.0)
        sin = tl.load(angles + half, mask=is_rotated, other=0.0)
        heads = sums.to(out.dtype).reshape(tile_rows, 2, 2 * half).permute(0, 2, 1)
        one, other = tl.split(heads)
        out.store([row, column], _rotated_head(one, cos, sin, tile_rows, half))
        out.store([row, column + 2 * half], _rotated_head(other, cos, sin, tile_rows, half))


def persistent_rotated(
    x: torch.Tensor,
    weight: torch.Tensor,
    rotary: Rotary,
    num_rotated: int,
    out: torch.Tensor,
    num_programs: int,
) -> None:
    """Write `x @ weight.T`, with rotary embeddings applied to the first `num_rotated` columns.

    `x` is `[num_rows, in_size]` and may be strided; `weight` is `[size, in_size]` and contiguous;
    `out` is `[num_rows, size]`, of heads of `ROTATED_HEAD_SIZE`, and may be strided. All are in 16
    bits, and their rows begin at multiples of 16 bytes. `num_rotated` is a multiple of two heads.
    At most `num_programs` run at the same time.
    """
    num_rows, in_size = x.shape
    size = len(weight)
    assert x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous()
    assert weight.shape[1] == in_size
    assert out.shape == (num_rows, size)
    assert num_rotated % _TILE_COLUMNS == 0
    assert rotary.table.shape[1] == ROTATED_HEAD_SIZE
    assert rotary.table.is_contiguous()
    assert rotary.positions.shape == (num_rows,)
    if not num_rows:
        return
    num_programs = min(num_programs, num_tiles(num_rows, size, _TILE_COLUMNS))
    _rotated_gemm[(num_programs,)](
        TensorDescriptor(x, [*x.shape], [*x.stride()], [TILE_ROWS, TILE_DEPTH]),
        TensorDescriptor(weight, [*weight.shape], [*weight.stride()], [_TILE_COLUMNS, TILE_DEPTH]),
        TensorDescriptor(out, [*out.shape], [*out.stride()], [TILE_ROWS, ROTATED_HEAD_SIZE]),
        rotary.positions,
        rotary.table,
        num_rows,
        size=size,
        in_size=in_size,
        num_rotated=num_rotated,
        half=ROTATED_HEAD_SIZE // 2,
        operand_type=dot_type(x),
        num_programs=num_programs,
        tile_rows=TILE_ROWS,
        tile_depth=TILE_DEPTH,
        group=TILE_GROUP,
        num_warps=8,
        num_stages=3,
        **dependent_launch(x.device),
    )
