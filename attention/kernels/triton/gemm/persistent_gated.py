"""GEMMs of many rows by persistent programs, which apply the gate of an MLP before they store.

As many programs as multiprocessors compute one tile of the output after another. The operands of a
tile are loaded by bulk copies of the Tensor Memory Accelerator, and the operands of the next tile
load while a tile is stored.

At these sizes the power limit of the GPU sets the speed, and moving bytes takes power. With a gate
in the same kernel, twice the columns of the output are neither written nor read. Results had the
same bits as cuBLAS with a kernel for the gate, wherever both were compared.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.triton.gated_activation import Gate, rounded_gate
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
from attention.kernels.triton.tuning import dot_type

__all__ = ["keeps_gpu_busy", "persistent_gated"]

_TILE_COLUMNS = 128
"""Columns of the output. The product before the gate has twice as many."""
_MANY_ROWS = 4096
"""From here on, three stages take less time than four."""
_LEAST_BUSY = 0.8
"""Minimum share of computed values that must be stored."""


def keeps_gpu_busy(num_rows: int, weight: torch.Tensor, num_programs: int) -> bool:
    """Return whether `persistent_gated` takes no longer than cuBLAS and a kernel for the gate.

    The kernel is as fast if most of the values that the programs compute are stored.
    """
    share = stored_share(num_rows, len(weight) // 2, _TILE_COLUMNS, num_programs)
    return share >= _LEAST_BUSY and can_copy_tiles(weight)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_gemm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    size: tl.constexpr,
    in_size: tl.constexpr,
    kind: tl.constexpr,
    operand_type: tl.constexpr,
    is_dependent: tl.constexpr,
    num_programs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Write every `num_programs`-th tile of the gated product.

    Launched by `persistent_gated`; grid `(num_programs,)`. Descriptors: x `[num_rows, in_size]`,
    weight `[2, size, in_size]`, out `[num_rows, size]`. Tiles are padded with zeros; values outside
    are not stored.
    """
    wait_for_inputs(is_dependent)
    num_down = tl.cdiv(num_rows, tile_rows)
    num_across: tl.constexpr = (size + tile_columns - 1) // tile_columns
    for tile in tl.range(tl.program_id(0), num_down * num_across, num_programs, flatten=True):
        row, column = tile_origin(tile, num_down, num_across, group, tile_rows, tile_columns)
        sums = tl.zeros([tile_rows, 2 * tile_columns], tl.float32)
        for element in range(0, in_size, tile_depth):
            inputs = x.load([row, element]).to(operand_type)
            # The gate's weights and the others are one operand, as in memory.
            both = weight.load([0, column, element]).reshape(2 * tile_columns, tile_depth)
            sums = tl.dot(inputs, both.to(operand_type).T, sums)
        halves = sums.reshape(tile_rows, 2, tile_columns).permute(0, 2, 1)
        product, other = tl.split(halves)
        gated = rounded_gate(product, other, kind, out.dtype)
        out.store([row, column], gated.to(out.dtype))


def persistent_gated(
    x: torch.Tensor, weight: torch.Tensor, kind: Gate, num_programs: int
) -> torch.Tensor:
    """Return `activation(first half of the columns) * second half` of `x @ weight.T`.

    `x` is `[num_rows, in_size]` and may be strided; `weight` is `[2 * size, in_size]` and
    contiguous; the result is `[num_rows, size]`. All are in 16 bits, and their rows begin at
    multiples of 16 bytes. At most `num_programs` run at the same time.
    """
    num_rows, in_size = x.shape
    size = len(weight) // 2
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert weight.shape[1] == in_size
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    num_programs = min(num_programs, num_tiles(num_rows, size, _TILE_COLUMNS))
    _gated_gemm[(num_programs,)](
        TensorDescriptor(x, [*x.shape], [*x.stride()], [TILE_ROWS, TILE_DEPTH]),
        TensorDescriptor(
            weight, [2, size, in_size], [size * in_size, in_size, 1], [2, _TILE_COLUMNS, TILE_DEPTH]
        ),
        TensorDescriptor(out, [*out.shape], [*out.stride()], [TILE_ROWS, _TILE_COLUMNS]),
        num_rows,
        size=size,
        in_size=in_size,
        kind=kind,
        operand_type=dot_type(x),
        num_programs=num_programs,
        tile_rows=TILE_ROWS,
        tile_columns=_TILE_COLUMNS,
        tile_depth=TILE_DEPTH,
        group=TILE_GROUP,
        num_warps=8,
        num_stages=3 if num_rows >= _MANY_ROWS else 4,
        **dependent_launch(x.device),
    )
    return out
