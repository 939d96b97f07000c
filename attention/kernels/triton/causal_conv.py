"""Causal depthwise convolutions of the segments of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import triton
import triton.language as tl

from attention.kernels.arguments import CHUNK_SIZE
from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.segments import chunk_of_program, max_chunks
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.arguments import Segments

__all__ = ["causal_conv"]

_DECODE_CHANNELS = 512
_CHUNK_CHANNELS = 64
"""Channels of a program."""
_CHUNK_WARPS = 4


@triton.jit
def _inputs(
    x: tl.tensor,
    state: tl.tensor,
    first: tl.tensor,
    order: tl.tensor,
    num_tokens: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    num_channels: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Return the inputs of a segment at positions `first + order`; negative ones are its state.

    Pointers: x to the first token of the segment, state `[width - 1, num_channels]`.
    """
    is_channel = (channels < num_channels)[None, :]
    positions = first + order
    is_new = ((positions >= 0) & (positions < num_tokens))[:, None] & is_channel
    places = order[:, None] * x_stride + channels[None, :]
    new = tl.load(x + first.to(tl.int64) * x_stride + places, mask=is_new, other=0.0)
    places = (positions + width - 1)[:, None] * num_channels + channels[None, :]
    old = tl.load(state + places, mask=(positions < 0)[:, None] & is_channel, other=0.0)
    return tl.where((positions < 0)[:, None], old, new)


@triton.jit
def _keep_last(
    x: tl.tensor,
    state: tl.tensor,
    num_tokens: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    num_channels: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Write the last inputs of a segment to its state; pointers as in `_inputs`."""
    is_channel = (channels < num_channels)[None, :]
    order = tl.arange(0, 1)
    # Of one column each: a state of another position is written only after it was read.
    for column in tl.static_range(width - 1):
        first = num_tokens - (width - 1 - column)
        kept = _inputs(x, state, first, order, num_tokens, channels, x_stride, num_channels, width)
        tl.store(state + column * num_channels + channels[None, :], kept, mask=is_channel)


@triton.jit(do_not_specialize=["num_segments", "num_tokens"])
def _causal_conv(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    query_starts: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    num_segments: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    row_stride: tl.tensor,
    num_channels: tl.constexpr,
    width: tl.constexpr,
    has_bias: tl.constexpr,
    has_silu: tl.constexpr,
    is_decode: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_channels: tl.constexpr,
) -> None:
    """Write the convolution of a chunk; in a decode, also update the state.

    Launched by `causal_conv`; grid `(chunks, tiles of channels)`. Pointers: x, out `[num_tokens,
    num_channels]`; weight `[num_channels, width]`; bias `[num_channels]`; states `[num_rows, width
    - 1, num_channels]`; query_starts, rows int32 as in `Segments`.
    """
    wait_for_inputs(is_dependent)
    index = tl.program_id(0)
    if is_decode:
        row, chunk_start, first, end = tl.load(rows + index), index, index, index + 1
    else:
        row, chunk_start, first, end = chunk_of_program(
            query_starts, rows, num_segments, num_tokens, index, False
        )
    order = tl.arange(0, tile_tokens)
    tokens = chunk_start + order
    channels = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels)
    is_channel = channels < num_channels
    is_out = (tokens < end)[:, None] & is_channel[None, :]
    out += tokens.to(tl.int64)[:, None] * num_channels + channels[None, :]
    if row < 0:
        tl.store(out, tl.zeros([tile_tokens, tile_channels], out.dtype.element_ty), mask=is_out)
        return
    x += first.to(tl.int64) * x_stride
    state = states + row.to(tl.int64) * row_stride
    sums = tl.zeros([tile_tokens, tile_channels], tl.float32)
    if has_bias:
        sums += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(width):
        start = chunk_start - first + tap - (width - 1)
        column = _inputs(
            x, state, start, order, end - first, channels, x_stride, num_channels, width
        )
        factor = tl.load(weight + channels * width + tap, mask=is_channel, other=0.0)
        sums += column.to(tl.float32) * factor.to(tl.float32)[None, :]
    if has_silu:
        sums = sums / (1.0 + tl.exp(-sums))
    tl.store(out, sums.to(out.dtype.element_ty), mask=is_out)
    if is_decode:
        _keep_last(x, state, end - first, channels, x_stride, num_channels, width)


@triton.jit
def _update_states(
    x: tl.tensor,
    states: tl.tensor,
    query_starts: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    row_stride: tl.tensor,
    num_channels: tl.constexpr,
    width: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_channels: tl.constexpr,
) -> None:
    """Write the last inputs of one segment to its state, for a tile of channels.

    Launched by `causal_conv`, after the programs that read the states; grid `(num_segments, tiles
    of channels)`, pointers as in `_causal_conv`.
    """
    wait_for_inputs(is_dependent)
    segment = tl.program_id(0)
    row = tl.load(rows + segment)
    first = tl.load(query_starts + segment)
    num_tokens = tl.load(query_starts + segment + 1) - first
    if row < 0:
        return
    channels = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels)
    x += first.to(tl.int64) * x_stride
    state = states + row.to(tl.int64) * row_stride
    _keep_last(x, state, num_tokens, channels, x_stride, num_channels, width)


_CAUSAL_CONV = KernelLauncher(_causal_conv)
_UPDATE_STATES = KernelLauncher(_update_states)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    segments: Segments,
    activation: Literal["silu"] | None,
) -> torch.Tensor:
    """Return the convolution of each segment, as `recurrent.causal_conv` does."""
    num_tokens, num_channels = x.shape
    width = weight.shape[1]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert states.dtype == x.dtype
    assert states.stride()[1:] == (num_channels, 1)
    out = torch.empty((num_tokens, num_channels), dtype=x.dtype, device=x.device)
    num_segments = len(segments.rows)
    is_decode = segments.max_query_len == 1
    tile = min(_DECODE_CHANNELS if is_decode else _CHUNK_CHANNELS, next_power_of_two(num_channels))
    num_tiles = triton.cdiv(num_channels, tile)
    is_dependent = can_depend(x.device)
    options = launch_options(x.device)
    _CAUSAL_CONV.launch(
        (num_segments if is_decode else max_chunks(num_tokens, segments), num_tiles, 1),
        (
            x,
            weight,
            weight if bias is None else bias,
            states,
            segments.query_starts,
            segments.rows,
            out,
        ),
        (
            x.stride(0),
            states.stride(0),
            num_channels,
            width,
            bias is not None,
            activation == "silu",
            is_decode,
            is_dependent,
            1 if is_decode else CHUNK_SIZE,
            tile,
        ),
        (num_segments, num_tokens),
        num_warps=4 if is_decode else _CHUNK_WARPS,
        **options,
    )
    if not is_decode:
        _UPDATE_STATES.launch(
            (num_segments, num_tiles, 1),
            (x, states, segments.query_starts, segments.rows),
            (x.stride(0), states.stride(0), num_channels, width, is_dependent, tile),
            num_warps=2,
            **options,
        )
    return out
