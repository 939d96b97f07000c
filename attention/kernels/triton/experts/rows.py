"""The experts of a few rows, at memory bandwidth: matrix-vector products instead of tiles.

Each row reads the weights of its own experts, so pairs are not sorted, and the second product adds
up the experts of a row. See `gemm/row_product.py` for the products.

Microseconds of a decode step of gpt-oss-20b on an H200, one sequence, with tiles of tensor cores
and with these kernels: 3295 and 1997 (`python -m bench.account --shape gpt-oss-20b --case 1`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.triton.experts.tiles import gated
from attention.kernels.triton.experts.tuning import MXFP4_HALF
from attention.kernels.triton.gemm.row_product import VECTOR_BYTES, add_row_product, weight_vectors
from attention.kernels.triton.kernel_launcher import (
    can_depend,
    launch_options,
    start_next_kernel,
    wait_for_inputs,
)

if TYPE_CHECKING:
    from attention.kernels.arguments import ExpertWeights

__all__ = ["row_expert_sums"]

_TILE_COLUMNS = 4
_TILE_BYTES = 2048
_NUM_WARPS = 4
_NUM_LANES = 32
_TILES_AT_ONCE = tl.constexpr(8)
"""Tiles of a warp, which take four registers of a thread each."""


@triton.jit
def _expert_product(
    x: tl.tensor,
    matrix: tl.tensor,
    scales: tl.tensor,
    read: tl.tensor,
    columns: tl.tensor,
    num_columns: tl.tensor,
    kind: tl.constexpr,
    size: tl.constexpr,
    row_size: tl.constexpr,
    half: tl.constexpr,
    unpacks: tl.constexpr,
    tile_columns: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> tl.tensor:
    """Return partial sums, one per thread, of the product of a row with an expert's columns.

    `read` are `columns` clamped to the last column.
    """
    sums = tl.zeros([tile_columns, tile // vector], tl.float32)
    num_tiles: tl.constexpr = (row_size + tile - 1) // tile
    for index in tl.static_range(num_tiles):
        values = weight_vectors(matrix, read, index * tile, row_size, tile, vector)
        sums = add_row_product(
            sums, values, x, scales, columns, num_columns, index * tile, kind, size,
            size // half if kind == "mxfp4" else 1, half, tile, vector, unpacks,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["first_expert"])
def _gate_up_rows(
    x: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    biases: tl.tensor,
    inner: tl.tensor,
    experts: tl.tensor,
    first_expert: tl.tensor,
    x_stride: tl.tensor,
    num_chosen: tl.constexpr,
    has_bias: tl.constexpr,
    activation: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    num_columns: tl.constexpr,
    hidden_size: tl.constexpr,
    inner_size: tl.constexpr,
    num_experts: tl.constexpr,
    kind: tl.constexpr,
    row_size: tl.constexpr,
    half: tl.constexpr,
    unpacks: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_columns: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    """Write the joined gate and up projection of a pair, for some columns.

    Launched by `row_expert_sums`; grid `(tiles of columns, num_pairs)`. Pointers: x `[num_rows,
    hidden_size]`; gate_up and scales as of `expert_sums`; biases `[num_experts, num_columns]`;
    inner `[num_pairs, inner_size]`; experts `[num_pairs]`.
    """
    # The next kernel starts once the experts are known.
    wait_for_inputs(is_dependent, starts_next=False)
    start_next_kernel(is_dependent)
    pair = tl.program_id(1)
    expert = (tl.load(experts + pair) - first_expert).to(tl.int64)
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    out = inner + pair.to(tl.int64) * inner_size + columns
    if (expert < 0) | (expert >= num_experts):
        # The expert is on another rank, but the next kernel reads this row of `inner` too.
        tl.store(out, tl.zeros_like(columns).to(inner.dtype.element_ty), mask=columns < inner_size)
        return
    read = tl.minimum(columns, inner_size - 1)
    matrix = gate_up + expert * (num_columns * row_size)
    scales += expert * (hidden_size // half * num_columns)
    row = x + (pair // num_chosen).to(tl.int64) * x_stride
    gate = _expert_product(
        row, matrix, scales, read, columns, num_columns, kind, hidden_size, row_size, half, unpacks,
        tile_columns, tile, vector,
    )  # fmt: skip
    up = gate
    if num_columns > inner_size:
        up = _expert_product(
            row, matrix, scales, read + inner_size, columns + inner_size, num_columns, kind,
            hidden_size, row_size, half, unpacks, tile_columns, tile, vector,
        )  # fmt: skip
    gate, up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if has_bias:
        biases += expert * num_columns
        gate += tl.load(biases + read).to(tl.float32)
        if num_columns > inner_size:
            up += tl.load(biases + inner_size + read).to(tl.float32)
    tl.store(
        out,
        gated(gate, up, activation, alpha, limit).to(inner.dtype.element_ty),
        mask=columns < inner_size,
    )


@triton.jit
def _own_matrix(
    down: tl.tensor,
    expert: tl.tensor,
    hidden_size: tl.constexpr,
    row_size: tl.constexpr,
    num_experts: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return a pointer to an expert's matrix, or another matrix, and if the expert is here."""
    is_ours = (expert >= 0) & (expert < num_experts)
    return down + tl.where(is_ours, expert, 0).to(tl.int64) * (hidden_size * row_size), is_ours


@triton.jit
def _load_tiles(
    matrix: tl.tensor,
    columns: tl.tensor,
    first: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> tl.tuple:
    """Return the tiles of columns from `first` on, each as of `weight_vectors`, a few at most."""
    end: tl.constexpr = min(first + _TILES_AT_ONCE, (size + tile - 1) // tile)
    tiles = ()
    for index in tl.static_range(first, end):
        # Triton can only add tuples.
        tiles = tiles + (  # type: ignore[assignment]  # noqa: RUF005
            weight_vectors(matrix, columns, index * tile, size, tile, vector),
        )
    return tiles


@triton.jit
def _early_tiles(
    down: tl.tensor,
    experts: tl.tensor,
    first_expert: tl.tensor,
    columns: tl.tensor,
    num_early: tl.constexpr,
    hidden_size: tl.constexpr,
    row_size: tl.constexpr,
    num_experts: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> tl.tuple:
    """Return `_load_tiles` of the first experts of a row, before `_gate_up_rows` has ended.

    That kernel has waited for the experts before it let the caller start.
    """
    tiles = ()
    for index in tl.static_range(num_early):
        # The L1 cache may have experts of before.
        expert = tl.load(experts + index, cache_modifier=".cg") - first_expert
        matrix, _ = _own_matrix(down, expert, hidden_size, row_size, num_experts)
        tiles += _load_tiles(matrix, columns, 0, row_size, tile, vector)
    return tiles


@triton.jit
def _tile_products(
    tiles: tl.tuple,
    skipped: tl.constexpr,
    inputs: tl.tensor,
    first: tl.constexpr,
    size: tl.constexpr,
    tile_columns: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> tl.tensor:
    """Return partial sums, one per thread, of the products of `_load_tiles` with the inputs.

    The first `skipped` tiles belong to other products.
    """
    end: tl.constexpr = min(first + _TILES_AT_ONCE, (size + tile - 1) // tile)
    sums = tl.zeros([tile_columns, tile // vector], tl.float32)
    for index in tl.static_range(first, end):
        elements = index * tile + tl.arange(0, tile)
        # Every column has its inputs, so that each warp loads them as its threads need them.
        places = tl.zeros([tile_columns], tl.int32)[:, None] + elements[None, :]
        is_inside = (elements < size)[None, :] | (size % tile == 0)
        values = tl.load(inputs + places, mask=is_inside, other=0.0)
        values = tl.reshape(values, [tile_columns, tile // vector, vector]).to(tl.float32)
        weights = tiles[skipped + index - first].to(tl.float32)
        sums += tl.sum(weights * values, axis=2)
    return sums


@triton.jit(do_not_specialize=["first_expert"])
def _down_rows(
    inner: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    biases: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    experts: tl.tensor,
    first_expert: tl.tensor,
    num_chosen: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    hidden_size: tl.constexpr,
    inner_size: tl.constexpr,
    num_experts: tl.constexpr,
    kind: tl.constexpr,
    row_size: tl.constexpr,
    half: tl.constexpr,
    unpacks: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_columns: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    """Write the weighted sum of a row's experts, for some columns, or add it if `adds` is set.

    Launched by `row_expert_sums`; grid `(tiles of columns, num_rows)`. Pointers: down and scales as
    of `expert_sums`; biases `[num_experts, hidden_size]`; weights `[num_rows, num_chosen]` float32;
    out `[num_rows, hidden_size]`; the others as of `_gate_up_rows`. Plain weights have a warp for
    each column.
    """
    row = tl.program_id(1)
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    read = tl.minimum(columns, hidden_size - 1)
    num_tiles: tl.constexpr = (row_size + tile - 1) // tile
    num_early: tl.constexpr = min(num_chosen, _TILES_AT_ONCE // num_tiles)
    early = ()
    if kind == "plain":
        early = _early_tiles(
            down, experts + row * num_chosen, first_expert, read, num_early, hidden_size, row_size,
            num_experts, tile, vector,
        )  # fmt: skip
    wait_for_inputs(is_dependent, starts_next=False)
    start_next_kernel(is_dependent)
    sums = tl.zeros([tile_columns, tile // vector], tl.float32)
    if kind == "plain":
        inner += row.to(tl.int64) * (num_chosen * inner_size)
        for index in tl.static_range(num_early):
            expert = tl.load(experts + row * num_chosen + index) - first_expert
            product = _tile_products(
                early, index * num_tiles, inner + index * inner_size, 0, inner_size, tile_columns,
                tile, vector,
            )  # fmt: skip
            # Experts of other ranks add nothing here.
            is_ours = (expert >= 0) & (expert < num_experts)
            share = tl.load(weights + row * num_chosen + index)
            sums += tl.where(is_ours, product * share, 0.0)
        for index in range(num_early, num_chosen):
            expert = tl.load(experts + row * num_chosen + index) - first_expert
            matrix, is_ours = _own_matrix(down, expert, hidden_size, row_size, num_experts)
            share = tl.load(weights + row * num_chosen + index)
            for first in tl.static_range(0, num_tiles, _TILES_AT_ONCE):
                tiles = _load_tiles(matrix, read, first, row_size, tile, vector)
                # All these loads are on their way before the first product waits.
                tl.debug_barrier()
                product = _tile_products(
                    tiles, 0, inner + index * inner_size, first, inner_size, tile_columns, tile,
                    vector,
                )  # fmt: skip
                sums += tl.where(is_ours, product * share, 0.0)
    total = tl.zeros([tile_columns], tl.float32)
    for index in tl.static_range(num_chosen if kind != "plain" or has_bias else 0):
        pair = row * num_chosen + index
        expert = (tl.load(experts + pair) - first_expert).to(tl.int64)
        share = tl.load(weights + pair)
        # Experts of other ranks add nothing here. There is no branch, so that the loads of all
        # experts overlap.
        is_ours = (expert >= 0) & (expert < num_experts)
        expert = tl.where(is_ours, expert, 0)
        if kind != "plain":
            product = _expert_product(
                inner + pair.to(tl.int64) * inner_size, down + expert * (hidden_size * row_size),
                scales + expert * (inner_size // half * hidden_size), read, columns, hidden_size,
                kind, inner_size, row_size, half, unpacks, tile_columns, tile, vector,
            )  # fmt: skip
            sums += tl.where(is_ours, product * share, 0.0)
        if has_bias:
            bias = tl.load(biases + expert * hidden_size + read).to(tl.float32)
            total += tl.where(is_ours, bias * share, 0.0)
    total += tl.sum(sums, axis=1)
    out += row.to(tl.int64) * hidden_size
    if adds:
        # Round first, as if the sum had been stored before the addition.
        total = tl.load(out + read).to(tl.float32) + total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=columns < hidden_size)


def row_expert_sums(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    stored: ExpertWeights,
    out: torch.Tensor,
    *,
    adds: bool,
) -> None:
    """Write `expert_sums` by kernels for few rows, or add them to `out`."""
    num_rows, hidden_size = x.shape
    num_chosen = experts.shape[1]
    inner_size = stored.inner_size
    gate_up, down = stored.gate_up, stored.down
    if stored.is_mxfp4:
        gate_up, down = gate_up.view(torch.int32), down.view(torch.int32)
    inner = x.new_empty((num_rows * num_chosen, inner_size))
    common = {
        "num_chosen": num_chosen,
        "hidden_size": hidden_size,
        "inner_size": inner_size,
        "num_experts": stored.num_experts,
        "kind": "mxfp4" if stored.is_mxfp4 else "plain",
        "half": MXFP4_HALF,
        # The interpreter has no inline assembly.
        "unpacks": x.is_cuda,
        "is_dependent": can_depend(x.device),
        "vector": VECTOR_BYTES // gate_up.element_size(),
        "num_warps": _NUM_WARPS,
        **launch_options(x.device),
    }
    tile = _TILE_BYTES // gate_up.element_size()
    alpha, limit = stored.clamp or (0.0, 0.0)
    # Without a gate, a program has twice the columns, so that it reads as much.
    input_columns = 2 * _TILE_COLUMNS * inner_size // stored.num_columns
    _gate_up_rows[(triton.cdiv(inner_size, input_columns), num_rows * num_chosen)](
        x,
        gate_up,
        gate_up if stored.gate_up_scales is None else stored.gate_up_scales,
        x if stored.gate_up_bias is None else stored.gate_up_bias,
        inner,
        experts,
        stored.first_expert,
        x.stride(0),
        has_bias=stored.gate_up_bias is not None,
        activation=stored.gate,
        alpha=alpha,
        limit=limit,
        num_columns=stored.num_columns,
        row_size=gate_up.shape[2],
        tile_columns=input_columns,
        tile=tile,
        **common,
    )
    _down_rows[(triton.cdiv(hidden_size, _TILE_COLUMNS), num_rows)](
        inner,
        down,
        down if stored.down_scales is None else stored.down_scales,
        inner if stored.down_bias is None else stored.down_bias,
        weights,
        out,
        experts,
        stored.first_expert,
        has_bias=stored.down_bias is not None,
        adds=adds,
        row_size=down.shape[2],
        tile_columns=_TILE_COLUMNS,
        tile=tile if stored.is_mxfp4 else _NUM_LANES * VECTOR_BYTES // gate_up.element_size(),
        **common,
    )
