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
from attention.kernels.triton.gemm.narrow_products import row_inputs
from attention.kernels.triton.gemm.row_product import VECTOR_BYTES, add_row_product, weight_vectors
from attention.kernels.triton.kernel_launcher import (
    can_depend,
    launch_options,
    start_next_kernel,
    wait_for_inputs,
)
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.arguments import ExpertWeights

__all__ = ["row_expert_sums"]

_TILE_COLUMNS = 4
_TILE_BYTES = 2048
_NUM_WARPS = 4
_MAX_PREFETCHED_BYTES = 24 << 20
"""Half of the L2 cache of a Hopper GPU."""
_LINE = tl.constexpr(64)
"""Numbers of 16 bits in a line of the L2 cache."""


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
            sums,
            values,
            x,
            scales,
            columns,
            num_columns,
            index * tile,
            kind,
            size,
            size // half if kind == "mxfp4" else 1,
            half,
            tile,
            vector,
            unpacks,
        )
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
        row,
        matrix,
        scales,
        read,
        columns,
        num_columns,
        kind,
        hidden_size,
        row_size,
        half,
        unpacks,
        tile_columns,
        tile,
        vector,
    )
    up = gate
    if num_columns > inner_size:
        up = _expert_product(
            row,
            matrix,
            scales,
            read + inner_size,
            columns + inner_size,
            num_columns,
            kind,
            hidden_size,
            row_size,
            half,
            unpacks,
            tile_columns,
            tile,
            vector,
        )
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
def _joined_products(
    inner: tl.tensor,
    down: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    first_expert: tl.tensor,
    read: tl.tensor,
    num_chosen: tl.constexpr,
    hidden_size: tl.constexpr,
    inner_size: tl.constexpr,
    num_experts: tl.constexpr,
    tile_columns: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> tl.tensor:
    """Return partial sums, one per thread, of the weighted products of a row's experts.

    The inputs of the experts are one after the other, as a single row: threads that multiply by
    different experts find these at the same time. Pointers of the row as in `_down_rows`; `read`
    are the columns, clamped to the last column.
    """
    size: tl.constexpr = num_chosen * inner_size
    num_tiles: tl.constexpr = (size + tile - 1) // tile
    sums = tl.zeros([tile_columns, tile // vector], tl.float32)
    for index in tl.static_range(num_tiles):
        starts = index * tile + tl.arange(0, tile // vector) * vector
        is_inside = starts < size
        place = starts // inner_size
        expert = tl.load(experts + place, mask=is_inside, other=-1) - first_expert
        # Experts of other ranks add nothing here.
        is_ours = is_inside & (expert >= 0) & (expert < num_experts)
        share = tl.load(weights + place, mask=is_ours, other=0.0)
        offsets = tl.where(is_ours, expert, 0).to(tl.int64) * (hidden_size * inner_size)
        offsets += starts - place * inner_size
        places = (read * inner_size)[:, None, None] + offsets[None, :, None]
        values = tl.load(
            down + places + tl.arange(0, vector)[None, None, :],
            mask=is_ours[None, :, None],
            other=0.0,
            eviction_policy="evict_first",
        )
        inputs = row_inputs(inner, starts, size, vector)
        products = tl.sum(values.to(tl.float32) * inputs[None, :, :], axis=2)
        sums += tl.where(is_ours[None, :], products * share[None, :], 0.0)
    return sums


@triton.jit
def prefetch_outputs(
    down: tl.tensor,
    experts: tl.tensor,
    first_expert: tl.tensor,
    read: tl.tensor,
    num_chosen: tl.constexpr,
    hidden_size: tl.constexpr,
    row_size: tl.constexpr,
    num_experts: tl.constexpr,
    num_lines: tl.constexpr,
) -> None:
    """Read the weights of some columns of a row's experts into the L2 cache, and nothing else.

    The experts may still be written, so that weights are read that nothing needs; `num_lines` is
    that of a column, or more. Pointer of the row: experts.
    """
    for index in tl.static_range(num_chosen):
        # Later loads of the experts must not find these in the L1 cache.
        expert = (tl.load(experts + index, cache_modifier=".cg") - first_expert).to(tl.int64)
        is_ours = (expert >= 0) & (expert < num_experts)
        lines = tl.minimum(tl.arange(0, num_lines) * _LINE, row_size - 1)
        places = expert * (hidden_size * row_size) + read[:, None] * row_size + lines[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(down + tl.where(is_ours, places, 0)).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


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
    num_lines: tl.constexpr,
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
    out `[num_rows, hidden_size]`; the others as of `_gate_up_rows`. If `num_lines` is not 0, it is
    that of a row of weights, which are read into the L2 cache before `inner` is written.
    """
    row = tl.program_id(1)
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    read = tl.minimum(columns, hidden_size - 1)
    if num_lines > 0:
        prefetch_outputs(
            down,
            experts + row * num_chosen,
            first_expert,
            read,
            num_chosen,
            hidden_size,
            row_size,
            num_experts,
            num_lines,
        )
    wait_for_inputs(is_dependent, starts_next=False)
    start_next_kernel(is_dependent)
    sums = tl.zeros([tile_columns, tile // vector], tl.float32)
    if kind == "plain":
        sums = _joined_products(
            inner + row.to(tl.int64) * (num_chosen * inner_size),
            down,
            weights + row * num_chosen,
            experts + row * num_chosen,
            first_expert,
            read,
            num_chosen,
            hidden_size,
            inner_size,
            num_experts,
            tile_columns,
            tile,
            vector,
        )
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
                inner + pair.to(tl.int64) * inner_size,
                down + expert * (hidden_size * row_size),
                scales + expert * (inner_size // half * hidden_size),
                read,
                columns,
                hidden_size,
                kind,
                inner_size,
                row_size,
                half,
                unpacks,
                tile_columns,
                tile,
                vector,
            )
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
        "tile": _TILE_BYTES // gate_up.element_size(),
        "vector": VECTOR_BYTES // gate_up.element_size(),
        "num_warps": _NUM_WARPS,
        **launch_options(x.device),
    }
    num_lines = 0
    num_read = num_chosen * hidden_size * down.shape[2] * down.dtype.itemsize
    is_small = num_rows == 1 and num_read <= _MAX_PREFETCHED_BYTES
    if is_small and down.dtype.itemsize == 2 and can_depend(x.device):
        num_lines = next_power_of_two(triton.cdiv(down.shape[2], _LINE.value))
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
        num_lines=num_lines,
        row_size=down.shape[2],
        tile_columns=_TILE_COLUMNS,
        **common,
    )
