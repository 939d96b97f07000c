"""Products of rows with their experts: `down(gate(x) joined with up(x))` of each, weighted.

A pair is a row and one of its experts. Pairs are put in the order of their experts, and each tile
of a product has pairs of one expert only; a few pairs are multiplied as `rows.py` says. The grid
depends on shapes alone and nothing is read by the host, so that CUDA graphs can capture it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.triton.dependent_launch import dependent_launch, wait_for_inputs
from attention.kernels.triton.experts.gate import gated
from attention.kernels.triton.experts.groups import grouped_pairs
from attention.kernels.triton.experts.mxfp4 import MXFP4_HALF, mxfp4_row_bytes
from attention.kernels.triton.experts.product import (
    add_product,
    rows_and_columns,
    tile_inputs,
    zero_sums,
)
from attention.kernels.triton.experts.rows import row_expert_sums
from attention.kernels.triton.experts.tuning import ExpertTuning, default_expert_tuning
from attention.kernels.triton.tiles import dot_type
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.expert_weights import ExpertWeights

__all__ = [
    "MAX_MXFP4_ROW_PAIRS",
    "MAX_ROW_PAIRS",
    "expert_sums",
]

MAX_ROW_PAIRS = 64
"""The most pairs whose products are of one row each."""
MAX_MXFP4_ROW_PAIRS = 32
"""The same in mxfp4."""
_SUM_TILE = 1024


def expert_sums(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    stored: ExpertWeights,
    *,
    tuning: ExpertTuning | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, `[num_rows, hidden_size]`.

    x is `[num_rows, hidden_size]`; experts integers and weights float32, `[num_rows, num_chosen]`.
    In mxfp4 on GPUs, x is in bfloat16.
    """
    num_rows, hidden_size = x.shape
    num_chosen = experts.shape[1]
    num_experts, inner_size, is_mxfp4 = stored.num_experts, stored.inner_size, stored.is_mxfp4
    assert is_mxfp4 == (stored.down_scales is not None)
    gate_up_row, down_row = hidden_size, inner_size
    if is_mxfp4:
        assert x.dtype == torch.bfloat16 or not x.is_cuda
        gate_up_row, down_row = mxfp4_row_bytes(hidden_size), mxfp4_row_bytes(inner_size)
    assert stored.gate_up.shape == (num_experts, 2 * inner_size, gate_up_row)
    assert stored.down.shape == (num_experts, hidden_size, down_row)
    assert x.stride(1) == 1
    assert stored.gate_up.is_contiguous()
    assert stored.down.is_contiguous()
    assert stored.gate_up_bias is None or stored.gate_up_bias.is_contiguous()
    assert stored.down_bias is None or stored.down_bias.is_contiguous()
    num_pairs = num_rows * num_chosen
    out = x.new_empty((num_rows, hidden_size))
    if not num_pairs:
        return out
    experts, weights = experts.contiguous(), weights.contiguous()
    if tuning is None and num_pairs <= (MAX_MXFP4_ROW_PAIRS if is_mxfp4 else MAX_ROW_PAIRS):
        return row_expert_sums(x, experts, weights, stored)
    tuning = tuning or default_expert_tuning(
        num_pairs=num_pairs, num_experts=num_experts, dtype=x.dtype, is_mxfp4=is_mxfp4
    )
    pairs, starts = grouped_pairs(
        experts, first_expert=stored.first_expert, num_experts=num_experts
    )
    # Only the last tile of an expert is not full.
    num_tiles = num_pairs // tuning.tile_pairs + min(num_pairs, num_experts)
    inner = x.new_empty((num_pairs, inner_size))
    parts = x.new_empty((num_pairs, hidden_size))
    where = (pairs, starts, num_pairs)
    tiling = {
        "hidden_size": hidden_size,
        "inner_size": inner_size,
        "num_experts": num_experts,
        "expert_tile": next_power_of_two(num_experts),
        "operand_type": dot_type(x),
        "is_mxfp4": is_mxfp4,
        # The interpreter has no inline assembly.
        "unpacks": x.is_cuda,
        "half": MXFP4_HALF,
        "tile_pairs": tuning.tile_pairs,
        "tile_columns": tuning.tile_columns,
        "tile_depth": tuning.tile_depth,
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
        **dependent_launch(x.device),
    }
    alpha, limit = stored.clamp or (0.0, 0.0)
    _gate_up[(triton.cdiv(inner_size, tuning.tile_columns), num_tiles)](
        x,
        stored.gate_up,
        stored.gate_up if stored.gate_up_scales is None else stored.gate_up_scales,
        x if stored.gate_up_bias is None else stored.gate_up_bias,
        inner,
        *where,
        x.stride(0),
        num_chosen,
        row_size=gate_up_row,
        has_bias=stored.gate_up_bias is not None,
        is_clamped=stored.clamp is not None,
        alpha=alpha,
        limit=limit,
        **tiling,
    )
    _down[(triton.cdiv(hidden_size, tuning.tile_columns), num_tiles)](
        inner,
        stored.down,
        stored.down if stored.down_scales is None else stored.down_scales,
        inner if stored.down_bias is None else stored.down_bias,
        weights,
        parts,
        *where,
        row_size=down_row,
        has_bias=stored.down_bias is not None,
        **tiling,
    )
    _sum[(num_rows, triton.cdiv(hidden_size, _SUM_TILE))](
        parts,
        experts,
        out,
        stored.first_expert,
        hidden_size,
        num_experts=num_experts,
        num_chosen=num_chosen,
        tile=_SUM_TILE,
        **dependent_launch(x.device),
    )
    return out


@triton.jit
def _located(
    starts: tl.tensor,
    num_experts: tl.constexpr,
    expert_tile: tl.constexpr,
    tile_pairs: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the expert of this program's tile, the place of its first pair and that behind it.

    The expert is `num_experts` if the tile is empty.
    """
    tile = tl.program_id(1)
    indices = tl.arange(0, expert_tile)
    is_expert = indices < num_experts
    begins = tl.load(starts + indices, mask=is_expert, other=0)
    ends = tl.load(starts + indices + 1, mask=is_expert, other=0)
    tiles = (ends - begins + tile_pairs - 1) // tile_pairs
    last_tiles = tl.cumsum(tiles, axis=0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), axis=0)
    is_ours = indices == expert
    num_before = tl.sum(tl.where(is_ours, last_tiles - tiles, 0), axis=0)
    begin = tl.sum(tl.where(is_ours, begins, 0), axis=0) + (tile - num_before) * tile_pairs
    return expert, begin, tl.sum(tl.where(is_ours, ends, 0), axis=0)


@triton.jit
def _pairs_of_tile(
    pairs: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    num_pairs: tl.tensor,
    tile_pairs: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the pairs of a tile, and which of them there are."""
    places = begin + tl.arange(0, tile_pairs)
    is_pair = (places < end) & (places < num_pairs)
    return tl.load(pairs + places, mask=is_pair, other=0).to(tl.int64), is_pair


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up(
    x: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    biases: tl.tensor,
    inner: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    num_pairs: tl.tensor,
    x_stride: tl.tensor,
    num_chosen: tl.tensor,
    has_bias: tl.constexpr,
    is_clamped: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    hidden_size: tl.constexpr,
    inner_size: tl.constexpr,
    num_experts: tl.constexpr,
    expert_tile: tl.constexpr,
    operand_type: tl.constexpr,
    is_mxfp4: tl.constexpr,
    unpacks: tl.constexpr,
    half: tl.constexpr,
    row_size: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_pairs: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
) -> None:
    """Write the joined gate and up projection of the pairs of a tile, for some columns.

    Launched by `expert_sums`; grid `(tiles of columns, num_tiles)`. Pointers: x `[num_rows,
    hidden_size]`; gate_up and scales as there, a column with `row_size` elements; biases
    `[num_experts, 2 * inner_size]`; inner `[num_pairs, inner_size]`; pairs `[num_pairs]` by their
    experts, and starts `[num_experts + 1]`, the place of each expert's first pair.
    """
    wait_for_inputs(is_dependent)
    expert, begin, end = _located(starts, num_experts, expert_tile, tile_pairs)
    if expert >= num_experts:
        return
    ours, is_pair = _pairs_of_tile(pairs, begin, end, num_pairs, tile_pairs)
    rows = ours // num_chosen
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    # Tiles that fit need no masks.
    is_column = (columns < inner_size) | (inner_size % tile_columns == 0)
    matrix = gate_up + expert.to(tl.int64) * 2 * inner_size * row_size
    scales += expert * (hidden_size // half) * 2 * inner_size
    gate = zero_sums(tile_pairs, tile_columns, is_mxfp4)
    up = zero_sums(tile_pairs, tile_columns, is_mxfp4)
    for first in range(0, hidden_size, tile_depth):
        lower, upper = tile_inputs(
            x,
            rows * x_stride,
            is_pair,
            first,
            hidden_size,
            operand_type,
            is_mxfp4,
            half,
            tile_depth,
        )
        gate = add_product(
            gate,
            lower,
            upper,
            matrix,
            scales,
            columns,
            is_column,
            first,
            hidden_size,
            row_size,
            2 * inner_size,
            is_mxfp4,
            unpacks,
            half,
            tile_depth,
        )
        up = add_product(
            up,
            lower,
            upper,
            matrix + inner_size * row_size,
            scales + inner_size,
            columns,
            is_column,
            first,
            hidden_size,
            row_size,
            2 * inner_size,
            is_mxfp4,
            unpacks,
            half,
            tile_depth,
        )
    gate, up = rows_and_columns(gate, is_mxfp4), rows_and_columns(up, is_mxfp4)
    if has_bias:
        biases += expert * 2 * inner_size + columns
        gate += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + inner_size, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        inner + ours[:, None] * inner_size + columns[None, :],
        gated(gate, up, is_clamped, alpha, limit).to(inner.dtype.element_ty),
        mask=is_pair[:, None] & is_column[None, :],
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _down(
    inner: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    biases: tl.tensor,
    weights: tl.tensor,
    parts: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    num_pairs: tl.tensor,
    has_bias: tl.constexpr,
    hidden_size: tl.constexpr,
    inner_size: tl.constexpr,
    num_experts: tl.constexpr,
    expert_tile: tl.constexpr,
    operand_type: tl.constexpr,
    is_mxfp4: tl.constexpr,
    unpacks: tl.constexpr,
    half: tl.constexpr,
    row_size: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_pairs: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_depth: tl.constexpr,
) -> None:
    """Write the weighted outputs of the pairs of a tile, for some columns.

    Launched by `expert_sums`; grid `(tiles of columns, num_tiles)`. Pointers: down and scales
    as there; biases `[num_experts, hidden_size]`; weights `[num_pairs]` float32;
    parts `[num_pairs, hidden_size]`; the others as of `_gate_up`.
    """
    wait_for_inputs(is_dependent)
    expert, begin, end = _located(starts, num_experts, expert_tile, tile_pairs)
    if expert >= num_experts:
        return
    ours, is_pair = _pairs_of_tile(pairs, begin, end, num_pairs, tile_pairs)
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    is_column = (columns < hidden_size) | (hidden_size % tile_columns == 0)
    matrix = down + expert.to(tl.int64) * hidden_size * row_size
    scales += expert * (inner_size // half) * hidden_size
    total = zero_sums(tile_pairs, tile_columns, is_mxfp4)
    for first in range(0, inner_size, tile_depth):
        lower, upper = tile_inputs(
            inner,
            ours * inner_size,
            is_pair,
            first,
            inner_size,
            operand_type,
            is_mxfp4,
            half,
            tile_depth,
        )
        total = add_product(
            total,
            lower,
            upper,
            matrix,
            scales,
            columns,
            is_column,
            first,
            inner_size,
            row_size,
            hidden_size,
            is_mxfp4,
            unpacks,
            half,
            tile_depth,
        )
    total = rows_and_columns(total, is_mxfp4)
    if has_bias:
        bias = tl.load(biases + expert * hidden_size + columns, mask=is_column, other=0.0)
        total += bias.to(tl.float32)[None, :]
    total *= tl.load(weights + ours, mask=is_pair, other=0.0)[:, None]
    tl.store(
        parts + ours[:, None] * hidden_size + columns[None, :],
        total.to(parts.dtype.element_ty),
        mask=is_pair[:, None] & is_column[None, :],
    )


@triton.jit(do_not_specialize=["first_expert"])
def _sum(
    parts: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    first_expert: tl.tensor,
    hidden_size: tl.tensor,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the sum of a row's parts, in their order, for some columns.

    Launched by `expert_sums`; grid `(num_rows, tiles of columns)`. Pointers: parts `[num_rows,
    num_chosen, hidden_size]`; experts `[num_rows, num_chosen]`; out `[num_rows, hidden_size]`.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    is_column = columns < hidden_size
    total = tl.zeros((tile,), dtype=tl.float32)
    for index in range(num_chosen):
        pair = row * num_chosen + index
        expert = tl.load(experts + pair) - first_expert
        # What other ranks add is not written here.
        if (expert >= 0) & (expert < num_experts):
            part = tl.load(parts + pair * hidden_size + columns, mask=is_column, other=0.0)
            total += part.to(tl.float32)
    tl.store(out + row * hidden_size + columns, total.to(out.dtype.element_ty), mask=is_column)
