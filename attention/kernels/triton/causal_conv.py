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
_CHUNK_CHANNELS = 512
"""Channels of a program."""
_CHUNK = tl.constexpr(CHUNK_SIZE)


@triton.jit
def _input(
    x: tl.tensor,
    state: tl.tensor,
    position: tl.tensor,
    is_there: tl.tensor,
    x_stride: tl.tensor,
    num_channels: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Return the channels of a segment at a position; negative positions are in its state.

    Pointers to channels: x of the first token of the segment, state of its oldest input.
    """
    new = x + position.to(tl.int64) * x_stride
    new = tl.load(new, mask=is_there & (position >= 0), other=0.0)
    old = state + (position + width - 1) * num_channels
    is_kept = is_there & (position < 0) & (position > -width)
    return tl.where(position < 0, tl.load(old, mask=is_kept, other=0.0), new).to(tl.float32)


@triton.jit
def _tap(
    weight: tl.tensor,
    channels: tl.tensor,
    is_channel: tl.tensor,
    age: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Return the weights of inputs of some age, which are 0 beyond the width."""
    is_tap = is_channel & (age < width)
    return tl.load(weight + channels * width + (width - 1 - age), mask=is_tap, other=0.0)


@triton.jit
def _store_sums(
    out: tl.tensor, is_there: tl.tensor, sums: tl.tensor, has_silu: tl.constexpr
) -> None:
    """Store the results of a token."""
    if has_silu:
        sums = sums / (1.0 + tl.exp(-sums))
    tl.store(out, sums.to(out.dtype.element_ty), mask=is_there)


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
    tile: tl.constexpr,
) -> None:
    """Write the convolution of a chunk; in a decode, also update the state.

    Launched by `causal_conv`; grid `(chunks, tiles of channels)`. Pointers: x, out `[num_tokens,
    num_channels]`; weight `[num_channels, width]`; bias `[num_channels]`; states `[num_rows, width
    - 1, num_channels]`; query_starts, rows int32 as in `Segments`.
    """
    wait_for_inputs(is_dependent)
    index = tl.program_id(0)
    if is_decode:
        row, start, first, end = tl.load(rows + index), index, index, index + 1
    else:
        row, start, first, end = chunk_of_program(
            query_starts, rows, num_segments, num_tokens, index, False
        )
    end = tl.minimum(end, start + _CHUNK)
    channels = tl.program_id(1) * tile + tl.arange(0, tile)
    is_channel = channels < num_channels
    out += start.to(tl.int64) * num_channels + channels
    if row < 0:
        for _ in range(start, end):
            tl.store(out, tl.zeros([tile], out.dtype.element_ty), mask=is_channel)
            out += num_channels
        return
    x += first.to(tl.int64) * x_stride + channels
    state = states + row.to(tl.int64) * row_stride + channels
    w0 = _tap(weight, channels, is_channel, 0, width).to(tl.float32)
    w1 = _tap(weight, channels, is_channel, 1, width).to(tl.float32)
    w2 = _tap(weight, channels, is_channel, 2, width).to(tl.float32)
    w3 = _tap(weight, channels, is_channel, 3, width).to(tl.float32)
    shift = tl.zeros([tile], tl.float32)
    if has_bias:
        shift += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    # The three inputs before a token, from the oldest one.
    before = start - first
    a = _input(x, state, before - 3, is_channel, x_stride, num_channels, width)
    b = _input(x, state, before - 2, is_channel, x_stride, num_channels, width)
    c = _input(x, state, before - 1, is_channel, x_stride, num_channels, width)
    x += before.to(tl.int64) * x_stride
    if is_decode:
        d = tl.load(x, mask=is_channel, other=0.0).to(tl.float32)
        _store_sums(out, is_channel, shift + a * w3 + b * w2 + c * w1 + d * w0, has_silu)
        if width > 3:
            tl.store(state + (width - 4) * num_channels, b.to(state.dtype.element_ty), is_channel)
        if width > 2:
            tl.store(state + (width - 3) * num_channels, c.to(state.dtype.element_ty), is_channel)
        tl.store(state + (width - 2) * num_channels, d.to(state.dtype.element_ty), is_channel)
    else:
        for token in range(start, end, 4):
            # Four loads are in flight at a time.
            has_e, has_f = is_channel & (token + 1 < end), is_channel & (token + 2 < end)
            has_g = is_channel & (token + 3 < end)
            d = tl.load(x, mask=is_channel, other=0.0).to(tl.float32)
            e = tl.load(x + x_stride, mask=has_e, other=0.0).to(tl.float32)
            f = tl.load(x + 2 * x_stride, mask=has_f, other=0.0).to(tl.float32)
            g = tl.load(x + 3 * x_stride, mask=has_g, other=0.0).to(tl.float32)
            _store_sums(out, is_channel, shift + a * w3 + b * w2 + c * w1 + d * w0, has_silu)
            out += num_channels
            _store_sums(out, has_e, shift + b * w3 + c * w2 + d * w1 + e * w0, has_silu)
            out += num_channels
            _store_sums(out, has_f, shift + c * w3 + d * w2 + e * w1 + f * w0, has_silu)
            out += num_channels
            _store_sums(out, has_g, shift + d * w3 + e * w2 + f * w1 + g * w0, has_silu)
            out += num_channels
            x += 4 * x_stride
            a, b, c = e, f, g


@triton.jit(do_not_specialize=["num_segments", "first_spare"])
def _update_states(
    x: tl.tensor,
    states: tl.tensor,
    query_starts: tl.tensor,
    rows: tl.tensor,
    save_ends: tl.tensor,
    num_segments: tl.tensor,
    first_spare: tl.tensor,
    x_stride: tl.tensor,
    row_stride: tl.tensor,
    num_channels: tl.constexpr,
    width: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the last inputs of one segment, or before one save, to a state, for some channels.

    Launched by `causal_conv`, after the programs that read the states; grid `(num_segments +
    num_spares, tiles of channels)`, pointers as in `_causal_conv` and `Segments`.
    """
    wait_for_inputs(is_dependent)
    segment = tl.program_id(0)
    if segment < num_segments:
        row = tl.load(rows + segment)
        first = tl.load(query_starts + segment)
        end = tl.load(query_starts + segment + 1)
    else:
        spare = segment - num_segments
        end = tl.load(save_ends + spare)
        first = end - _CHUNK
        row = tl.where(end < 0, -1, first_spare + spare)
    if row < 0:
        return
    channels = tl.program_id(1) * tile + tl.arange(0, tile)
    is_channel = channels < num_channels
    x += first.to(tl.int64) * x_stride + channels
    state = states + row.to(tl.int64) * row_stride + channels
    # A column is written only after it was read: the inputs that move are in later columns.
    for column in tl.static_range(width - 1):
        position = end - first - (width - 1) + column
        kept = _input(x, state, position, is_channel, x_stride, num_channels, width)
        kept = kept.to(states.dtype.element_ty)
        tl.store(state + column * num_channels, kept, mask=is_channel)


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
    assert 2 <= width <= 4
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
        (num_segments if is_decode else max_chunks(num_tokens, num_segments), num_tiles, 1),
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
            tile,
        ),
        (num_segments, num_tokens),
        num_warps=4 if is_decode else 2,
        **options,
    )
    if not is_decode and not segments.keeps_states:
        starts, rows = segments.query_starts, segments.rows
        _UPDATE_STATES.launch(
            (num_segments + segments.num_spares, num_tiles, 1),
            (x, states, starts, rows, rows if segments.save_ends is None else segments.save_ends),
            (x.stride(0), states.stride(0), num_channels, width, is_dependent, tile),
            (num_segments, len(states) - segments.num_spares),
            num_warps=2,
            **options,
        )
    return out
