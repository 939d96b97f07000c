"""Adds rows that another GPU has written to this one's memory, once they have arrived.

The other rank's copy engine writes its rows, and then a flag. One kernel waits for the flag; the
next one adds both ranks' rows to the residual stream and norms it, as `one_shot_all_reduce` does
with rows that its own programs have sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.triton.kernel_launcher import KernelLauncher
from attention.kernels.triton.tuning import next_power_of_two

__all__ = ["ReceivedRows", "add_received", "add_received_norm", "finish_row", "stream_row"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReceivedRows:
    """The memory for rows of another rank, and the flag that shows that all have arrived."""

    rows: torch.Tensor
    """`[max_rows, width]`, the first of which are sent."""
    flag: torch.Tensor
    """int32 `[1]`: the number of the last sum with rows that have arrived."""
    number: torch.Tensor
    """int32 `[1]`: the number of the next sum of this rank, which each sum increases."""
    abort: torch.Tensor
    """int64 `[1]`: the address of an int32 in host memory that ends the wait if it is not zero."""


@triton.jit
def _await_rows(flag: tl.tensor, number: tl.tensor, abort: tl.tensor) -> None:
    """Wait until the flag equals the number, then increase the number.

    Launched by `add_received` and `add_received_norm`; grid `(1,)`. Pointers as in `ReceivedRows`.
    """
    awaited = tl.load(number)
    is_waiting = tl.atomic_or(flag, 0, sem="acquire", scope="sys") != awaited
    num_polls = 0
    while is_waiting:
        is_waiting = tl.atomic_or(flag, 0, sem="acquire", scope="sys") != awaited
        num_polls += 1
        # Read host memory rarely: one read takes longer than most waits.
        if num_polls % 1024 == 0:
            address = tl.load(abort).to(tl.pointer_type(tl.int32))
            is_waiting = is_waiting and tl.load(address, volatile=True) == 0
    tl.store(number, awaited + 1)


@triton.jit
def _add_received(
    delta: tl.tensor,
    received: tl.tensor,
    stream: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    delta_stride: tl.tensor,
    stream_stride: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    is_centered: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Add one row of both ranks; write the sum, or the norm of the stream plus the sum.

    Launched by `add_received` and `add_received_norm`; grid `(num_rows,)`. Pointers: delta,
    received, stream, out `[num_rows, width]`; weight, bias `[width]`.
    """
    row = tl.program_id(0).to(tl.int64)
    elements = tl.arange(0, tile)
    is_element = elements < width
    before = stream_row(row, delta, stream, stream_stride, width, has_norm, tile)
    mine = tl.load(delta + row * delta_stride + elements, mask=is_element, other=0.0)
    theirs = tl.load(received + row * width + elements, mask=is_element, other=0.0)
    # Both ranks add the same two numbers, so that the sum has the same bits on both.
    added = (mine.to(tl.float32) + theirs.to(tl.float32)).to(delta.dtype.element_ty)
    finish_row(
        row, added, before, delta, stream, weight, bias, out, delta_stride, stream_stride,
        eps, width, has_norm, has_bias, is_centered, tile,
    )  # fmt: skip


_AWAIT_ROWS = KernelLauncher(_await_rows)

_ADD_RECEIVED = KernelLauncher(_add_received)


def add_received(delta: torch.Tensor, received: ReceivedRows) -> None:
    """Add the rows of the other rank to `delta`, `[num_rows, width]`, in place."""
    _launch(delta, received, None, delta, None, delta, 0.0, is_centered=False)


def add_received_norm(
    stream: torch.Tensor,
    delta: torch.Tensor,
    received: ReceivedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_centered: bool,
) -> torch.Tensor:
    """Return the norm of `stream` plus the rows of both ranks, `[num_rows, width]`.

    `stream` becomes that sum; the norm is that of `token_rows.add_norm`.
    """
    assert stream.shape == delta.shape
    assert stream.stride(1) == 1
    out = torch.empty_like(delta, memory_format=torch.contiguous_format)
    _launch(delta, received, stream, weight, bias, out, eps, is_centered=is_centered)
    return out


def _launch(
    delta: torch.Tensor,
    received: ReceivedRows,
    stream: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    *,
    is_centered: bool,
) -> None:
    num_rows, width = delta.shape
    assert num_rows <= len(received.rows)
    assert width == received.rows.shape[1]
    assert received.rows.is_contiguous()
    assert delta.stride(1) == 1
    # A kernel of one program waits: polling by all programs would delay the arrival of the rows.
    _AWAIT_ROWS.launch((1, 1, 1), (received.flag, received.number, received.abort), (), num_warps=1)
    tile = next_power_of_two(width)
    _ADD_RECEIVED.launch(
        (num_rows, 1, 1),
        (
            delta,
            received.rows,
            delta if stream is None else stream,
            weight,
            weight if bias is None else bias,
            out,
        ),
        (
            delta.stride(0),
            0 if stream is None else stream.stride(0),
            eps,
            width,
            stream is not None,
            bias is not None,
            is_centered,
            tile,
        ),
        num_warps=min(16, max(4, tile // 512)),
    )


@triton.jit
def stream_row(
    row: tl.tensor,
    delta: tl.tensor,
    stream: tl.tensor,
    stream_stride: tl.tensor,
    width: tl.constexpr,
    has_norm: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """Return a row of the stream, read before the wait for other ranks; zeros without a norm."""
    elements = tl.arange(0, tile)
    if has_norm:
        before = tl.load(stream + row * stream_stride + elements, mask=elements < width, other=0.0)
    else:
        before = tl.zeros([tile], delta.dtype.element_ty)
    return before


@triton.jit
def finish_row(
    row: tl.tensor,
    added: tl.tensor,
    before: tl.tensor,
    delta: tl.tensor,
    stream: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    delta_stride: tl.tensor,
    stream_stride: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    is_centered: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the sum of a row; or with `has_norm`, add it to `before` and write stream and norm."""
    elements = tl.arange(0, tile)
    is_element = elements < width
    if has_norm:
        kept = (before.to(tl.float32) + added.to(tl.float32)).to(stream.dtype.element_ty)
        tl.store(stream + row * stream_stride + elements, kept, mask=is_element)
        x = tl.where(is_element, kept.to(tl.float32), 0.0)
        if is_centered:
            x = tl.where(is_element, x - tl.sum(x, axis=0) / width, 0.0)
        normed = x / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
        normed *= tl.load(weight + elements, mask=is_element, other=0.0).to(tl.float32)
        if has_bias:
            normed += tl.load(bias + elements, mask=is_element, other=0.0).to(tl.float32)
        tl.store(out + row * width + elements, normed.to(out.dtype.element_ty), mask=is_element)
    else:
        tl.store(delta + row * delta_stride + elements, added, mask=is_element)
