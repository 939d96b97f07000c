"""The residual addition and the norm that follow the sum of a row over the ranks."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finish_row", "stream_row"]


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
