"""Loads vectors with their rotary embeddings."""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.rotation import rotated

__all__ = ["load_rotated_vectors"]


@triton.jit
def load_rotated_vectors(
    pointer: tl.tensor,
    offsets: tl.tensor,
    is_vector: tl.tensor,
    rotary_table: tl.tensor,
    rotary_offsets: tl.tensor,
    head_size: tl.constexpr,
) -> tl.tensor:
    """Return vectors `[vectors, head_size]`, rotated and rounded as `rotate_heads` does.

    `offsets` is `[vectors]` int64, `is_vector` `[vectors]` bool. `rotary_offsets`, int64, are the
    offsets in the float32 `rotary_table` of the `head_size / 2` cosines, then sines, of each
    vector: `[vectors]`, or `[1]` if all vectors have the same position. `head_size` is a power of
    two.
    """
    half: tl.constexpr = head_size // 2
    dims = tl.arange(0, head_size)
    is_first = dims < half
    mask = is_vector[:, None]
    halves = rotary_table + rotary_offsets[:, None] + (dims % half)[None, :]
    cos = tl.load(halves)
    sin = tl.load(halves + half)
    partners = tl.where(is_first, dims + half, dims - half)
    own = tl.load(pointer + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    other = tl.load(pointer + offsets[:, None] + partners[None, :], mask=mask, other=0.0)
    sin = tl.where(is_first[None, :], -sin, sin)
    return rotated(own.to(tl.float32), other.to(tl.float32), cos, sin).to(own.dtype)
