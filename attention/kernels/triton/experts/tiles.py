"""Grouped GEMMs over tiles of pairs, each of one expert, and the sum of the outputs of a row."""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.gemm.narrow_products import e2m1_numbers
from attention.kernels.triton.kernel_launcher import wait_for_inputs

__all__ = ["gated", "sum_parts", "tile_down", "tile_gate_up"]

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
    activation: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    num_columns: tl.constexpr,
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
    hidden_size]`; gate_up and scales as there, `num_columns` of an expert with `row_size` elements
    each; biases `[num_experts, num_columns]`; inner `[num_pairs, inner_size]`; pairs `[num_pairs]`
    by their experts, and starts `[num_experts + 1]`, the place of each expert's first pair.
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
    matrix = gate_up + expert.to(tl.int64) * num_columns * row_size
    scales += expert * (hidden_size // half) * num_columns
    gate = zero_sums(tile_pairs, tile_columns, is_mxfp4)
    up = zero_sums(tile_pairs, tile_columns, is_mxfp4)
    for first in range(0, hidden_size, tile_depth):
        lower, upper = tile_inputs(
            x, rows * x_stride, is_pair, first, hidden_size, operand_type, is_mxfp4, half,
            tile_depth,
        )  # fmt: skip
        gate = add_product(
            gate, lower, upper, matrix, scales, columns, is_column, first, hidden_size, row_size,
            num_columns, is_mxfp4, unpacks, half, tile_depth,
        )  # fmt: skip
        if num_columns > inner_size:
            up = add_product(
                up, lower, upper, matrix + inner_size * row_size, scales + inner_size, columns,
                is_column, first, hidden_size, row_size, num_columns, is_mxfp4, unpacks, half,
                tile_depth,
            )  # fmt: skip
    gate, up = rows_and_columns(gate, is_mxfp4), rows_and_columns(up, is_mxfp4)
    if has_bias:
        biases += expert * num_columns + columns
        gate += tl.load(biases, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if num_columns > inner_size:
            up += tl.load(biases + inner_size, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        inner + ours[:, None] * inner_size + columns[None, :],
        gated(gate, up, activation, alpha, limit).to(inner.dtype.element_ty),
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
            inner, ours * inner_size, is_pair, first, inner_size, operand_type, is_mxfp4, half,
            tile_depth,
        )  # fmt: skip
        total = add_product(
            total, lower, upper, matrix, scales, columns, is_column, first, inner_size, row_size,
            hidden_size, is_mxfp4, unpacks, half, tile_depth,
        )  # fmt: skip
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
    adds: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the sum of a row's parts, in their order, for some columns, or add it if `adds` is set.

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
    out += row * hidden_size + columns
    if adds:
        # Round first, as if the sum had been stored before the addition.
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(out, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out, total.to(out.dtype.element_ty), mask=is_column)


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
            x + rows[:, None] + depth[None, :], mask=is_row[:, None] & is_deep[None, :], other=0.0
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
            matrix + columns[:, None] * row_size + places[None, :], mask=is_column[:, None], other=0
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


@triton.jit
def gated(
    gate: tl.tensor,
    up: tl.tensor,
    activation: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
) -> tl.tensor:
    """Return `activation(gate) * up`, or if that is `clamped` the `ClampedGate`; all float32.

    `relu2` has no gate and reads `gate` alone.
    """
    if activation == "clamped":
        # Unlike minimum and maximum, these comparisons propagate NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    elif activation == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-2.0 * inner)) * up
    elif activation == "relu2":
        # NaN remains.
        return tl.where(gate < 0.0, 0.0, gate * gate)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up
