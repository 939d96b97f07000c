"""Grouped GEMMs over tiles of pairs, each of one expert, and the sum of the outputs of a row."""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.experts.gate import gated
from attention.kernels.triton.experts.product import (
    add_product,
    rows_and_columns,
    tile_inputs,
    zero_sums,
)
from attention.kernels.triton.launches.dependent_launch import wait_for_inputs

__all__ = ["sum_parts", "tile_down", "tile_gate_up"]


@triton.jit
def _located(
    starts: tl.tensor,
    num_experts: tl.constexpr,
    expert_tile: tl.constexpr,
    tile_pairs: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the expert of this program's tile, and the range of its pairs, end excluded.

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
    """Return the pairs of a tile, and the mask of existing pairs."""
    places = begin + tl.arange(0, tile_pairs)
    is_pair = (places < end) & (places < num_pairs)
    return tl.load(pairs + places, mask=is_pair, other=0).to(tl.int64), is_pair


@triton.jit(do_not_specialize=["num_pairs"])
def tile_gate_up(
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
def tile_down(
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
    parts `[num_pairs, hidden_size]`; the others as of `tile_gate_up`.
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
def sum_parts(
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
        # Experts of other ranks add nothing here.
        if (expert >= 0) & (expert < num_experts):
            part = tl.load(parts + pair * hidden_size + columns, mask=is_column, other=0.0)
            total += part.to(tl.float32)
    tl.store(out + row * hidden_size + columns, total.to(out.dtype.element_ty), mask=is_column)
