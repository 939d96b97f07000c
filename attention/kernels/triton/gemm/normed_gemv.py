"""Products of the RMSNorm of one row with a weight: `gemv` fused with the norm before it.

Every program computes the sum of squares of the whole row, which it reads from the L2 cache while
its first weights are loaded from memory. This takes less time than a separate kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.triton.gated_activation import rounded_gate
from attention.kernels.triton.gemm.narrow_products import row_inputs
from attention.kernels.triton.gemm.row_product import VECTOR_BYTES, weight_vectors
from attention.kernels.triton.kernel_launcher import dependent_launch, wait_for_inputs

if TYPE_CHECKING:
    from attention.kernels.arguments import DeferredRMSNorm, RowConv
    from attention.kernels.triton.gemm.gemv import GemvTuning

__all__ = ["normed_gemv", "normed_gemv_gated"]

_MAX_WIDTH = 4
"""Tokens of a convolution."""


@triton.jit
def _inverse_root_mean_square(
    stream: tl.tensor, eps: tl.tensor, size: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """Return `1 / sqrt(mean square of a row + eps)`, float32."""
    squares = tl.zeros([tile], tl.float32)
    for first in tl.static_range(0, size, tile):
        elements = first + tl.arange(0, tile)
        x = tl.load(stream + elements, mask=elements < size, other=0.0).to(tl.float32)
        squares += x * x
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / size + eps)


@triton.jit
def _normed_inputs(
    stream: tl.tensor,
    norm_weight: tl.tensor,
    inverse: tl.tensor,
    first: tl.tensor,
    size: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> tl.tensor:
    """Return `[tile / vector, vector]` elements of the norm from `first` on, float32."""
    starts = first + tl.arange(0, tile // vector) * vector
    # GPUs divide in this way, too.
    normed = row_inputs(stream, starts, size, vector) * inverse
    normed *= row_inputs(norm_weight, starts, size, vector)
    # Round as if the norm had been stored.
    return normed.to(stream.dtype.element_ty).to(tl.float32)


@triton.jit
def _store_inputs(
    normed: tl.tensor,
    inputs: tl.tensor,
    first: tl.tensor,
    size: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    """Write what `_normed_inputs` returned, once of all programs."""
    elements = first + tl.arange(0, tile // vector)[:, None] * vector
    elements += tl.arange(0, vector)[None, :]
    is_first = tl.program_id(0) == 0
    tl.store(normed + elements, inputs.to(normed.dtype.element_ty), is_first & (elements < size))


@triton.jit
def _earlier_input(
    state: tl.tensor,
    channels: tl.tensor,
    is_kept: tl.tensor,
    age: tl.constexpr,
    num_channels: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Return the inputs of channels `age` tokens before, float32, or zeros before the width."""
    places = (width - 1 - age) * num_channels + channels
    return tl.load(state + places, mask=is_kept & (age < width), other=0.0).to(tl.float32)


@triton.jit
def _tap(
    weight: tl.tensor,
    channels: tl.tensor,
    is_channel: tl.tensor,
    age: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Return the weights of inputs `age` tokens before, float32."""
    places = channels * width + width - 1 - age
    return tl.load(weight + places, mask=is_channel & (age < width), other=0.0).to(tl.float32)


@triton.jit
def _normed_gemv(
    stream: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    states: tl.tensor,
    rows: tl.tensor,
    normed: tl.tensor,
    out_size: tl.tensor,
    eps: tl.tensor,
    row_stride: tl.tensor,
    first_channel: tl.constexpr,
    num_channels: tl.constexpr,
    width: tl.constexpr,
    has_conv_bias: tl.constexpr,
    stores_norm: tl.constexpr,
    size: tl.constexpr,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    gate: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_columns: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    """Write `tile_columns` output columns.

    Launched by `normed_gemv` and `normed_gemv_gated`; grid `(tiles of columns,)`. Pointers: stream
    and norm_weight `[size]`; weight `[out_size, size]`, or twice as many rows if it is gated; bias
    and out `[out_size]`. If `num_channels` is not 0, columns from `first_channel` on are convolved:
    the other pointers are as in `RowConv`. With `stores_norm`, the norm is written to normed,
    `[size]`.
    """
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    # Columns past the end repeat earlier columns, and are not stored.
    read = tl.minimum(columns, out_size - 1)
    sums = tl.zeros([tile_columns, tile // vector], tl.float32)
    other = tl.zeros([tile_columns, tile // vector], tl.float32)
    values = weight_vectors(weight, read, 0, size, tile, vector)
    if is_gated:
        other_values = weight_vectors(weight, read + out_size, 0, size, tile, vector)
    wait_for_inputs(is_dependent)
    if num_channels > 0:
        channels = columns - first_channel
        is_channel = (channels >= 0) & (channels < num_channels)
        row = tl.load(rows)
        is_kept = is_channel & (row >= 0)
        states += row.to(tl.int64) * row_stride
        # No other program writes these. The product is summed over threads after they have read.
        a = _earlier_input(states, channels, is_kept, 3, num_channels, width)
        b = _earlier_input(states, channels, is_kept, 2, num_channels, width)
        c = _earlier_input(states, channels, is_kept, 1, num_channels, width)
    inverse = _inverse_root_mean_square(stream, eps, size, tile)
    num_tiles: tl.constexpr = (size + tile - 1) // tile
    for index in range(1, num_tiles):
        next_values = weight_vectors(weight, read, index * tile, size, tile, vector)
        if is_gated:
            next_other = weight_vectors(weight, read + out_size, index * tile, size, tile, vector)
        first = (index - 1) * tile
        inputs = _normed_inputs(stream, norm_weight, inverse, first, size, tile, vector)
        if stores_norm:
            _store_inputs(normed, inputs, first, size, tile, vector)
        sums += tl.sum(values.to(tl.float32) * inputs[None, :, :], axis=2)
        values = next_values
        if is_gated:
            other += tl.sum(other_values.to(tl.float32) * inputs[None, :, :], axis=2)
            other_values = next_other
    first = (num_tiles - 1) * tile
    inputs = _normed_inputs(stream, norm_weight, inverse, first, size, tile, vector)
    if stores_norm:
        _store_inputs(normed, inputs, first, size, tile, vector)
    sums += tl.sum(values.to(tl.float32) * inputs[None, :, :], axis=2)
    product = tl.sum(sums, axis=1)
    if has_bias:
        product += tl.load(bias + read).to(tl.float32)
    element_type = out.dtype.element_ty
    if is_gated:
        other += tl.sum(other_values.to(tl.float32) * inputs[None, :, :], axis=2)
        product = rounded_gate(product, tl.sum(other, axis=1), gate, element_type)
    if num_channels > 0:
        # Round as if the columns had been stored.
        d = product.to(element_type).to(tl.float32)
        sums = tl.zeros([tile_columns], tl.float32)
        if has_conv_bias:
            sums += tl.load(conv_bias + channels, mask=is_channel, other=0.0).to(tl.float32)
        sums += a * _tap(conv_weight, channels, is_channel, 3, width)
        sums += b * _tap(conv_weight, channels, is_channel, 2, width)
        sums += c * _tap(conv_weight, channels, is_channel, 1, width)
        sums += d * _tap(conv_weight, channels, is_channel, 0, width)
        product = tl.where(is_channel, sums / (1.0 + tl.exp(-sums)), product)
        states += channels
        if width > 3:
            tl.store(states, b.to(element_type), mask=is_kept)
        if width > 2:
            tl.store(states + (width - 3) * num_channels, c.to(element_type), mask=is_kept)
        tl.store(states + (width - 2) * num_channels, d.to(element_type), mask=is_kept)
    tl.store(out + columns, product.to(element_type), mask=columns < out_size)


def normed_gemv(
    row: DeferredRMSNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tuning: GemvTuning,
    conv: RowConv | None = None,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `norm(row) @ weight.T + bias`, `[1, out_size]`; the norm is that of `add_norm`.

    `weight` is `[out_size, size]`, contiguous and of the row's dtype, or float32 as the result.
    With `conv`, some columns are convolved. The norm is written to `normed`, if given.
    """
    return _launched(row, weight, bias, len(weight), tuning, gate=None, conv=conv, normed=normed)


def normed_gemv_gated(
    row: DeferredRMSNorm, weight: torch.Tensor, gate: str, tuning: GemvTuning
) -> torch.Tensor:
    """Return `activation(first half of the columns) * second half` of `norm(row) @ weight.T`.

    Takes the arguments of `normed_gemv`; the result is `[1, out_size / 2]`.
    """
    return _launched(row, weight, None, len(weight) // 2, tuning, gate=gate)


def _launched(
    row: DeferredRMSNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_size: int,
    tuning: GemvTuning,
    *,
    gate: str | None,
    conv: RowConv | None = None,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    stream = row.stream
    num_rows, size = stream.shape
    assert num_rows == 1
    assert stream.stride(1) == 1
    assert row.weight.shape == (size,)
    assert weight.dtype in (stream.dtype, torch.float32)
    assert normed is None or (normed.shape == stream.shape and normed.stride(1) == 1)
    assert weight.is_contiguous()
    assert weight.shape[1] == size
    out = torch.empty((1, out_size), dtype=weight.dtype, device=stream.device)
    numbers = stream if normed is None else normed, out_size, row.eps
    convolution: tuple[object, ...] = (weight,) * 4 + numbers + (0, 0, 0, 1, False)
    if conv is not None:
        num_channels, width = conv.weight.shape
        assert 2 <= width <= _MAX_WIDTH
        assert conv.weight.is_contiguous()
        assert conv.states.dtype == stream.dtype
        assert conv.states.stride()[1:] == (num_channels, 1)
        has_bias = conv.bias is not None
        convolution = (
            *(conv.weight, conv.bias if has_bias else conv.weight, conv.states, conv.rows),
            *(*numbers, conv.states.stride(0), conv.first_column, num_channels, width, has_bias),
        )
    _normed_gemv[(triton.cdiv(out_size, tuning.tile_columns),)](
        stream,
        row.weight,
        weight,
        weight if bias is None else bias,
        out,
        *convolution,
        stores_norm=normed is not None,
        size=size,
        has_bias=bias is not None,
        is_gated=gate is not None,
        gate=gate,
        tile_columns=tuning.tile_columns,
        tile=tuning.tile_bytes // weight.element_size(),
        vector=VECTOR_BYTES // weight.element_size(),
        num_warps=tuning.num_warps,
        **dependent_launch(stream.device),
    )
    return out
