"""Merges partial results of attention, each over a range of the keys of a sequence.

The second pass of flash decoding (Dao et al., 2023), run by the last program to finish.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["merge_parts"]


@triton.jit
def merge_parts(
    parts: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    first_part: tl.tensor,
    num_parts: tl.tensor,
    num_heads: tl.tensor,
    first_head: tl.tensor,
    out_head_stride: tl.tensor,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    num_merged_heads: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    parts_at_once: tl.constexpr,
) -> None:
    """Write adjacent heads of a row: the row's parts, weighted by their sums of exponentials.

    Pointers: parts `[num_parts, num_heads, head_size]` and part_lse `[num_parts, num_heads]`,
    float32, of which those of the row begin at `first_part`, counted in heads; out `[num_heads,
    head_size]` and lse `[num_heads]` float32, of the row; sinks `[num_heads]` float32.
    `parts_at_once`, a power of two, is limited by the registers. Loads bypass the L1 cache, because
    other programs may have written the parts.
    """
    padded_heads: tl.constexpr = triton.next_power_of_2(num_merged_heads)
    some_heads = tl.arange(0, padded_heads)
    is_head = some_heads < num_merged_heads
    heads = first_head + some_heads
    dims = tl.arange(0, padded_size)
    top = tl.full([padded_heads], float("-inf"), tl.float32)
    total = tl.zeros([padded_heads], tl.float32)
    merged = tl.zeros([padded_heads, padded_size], tl.float32)
    if has_sinks:
        top = tl.load(sinks + heads, mask=is_head, other=0.0)
        total += 1.0
    for first in range(0, num_parts, parts_at_once):
        some = first + tl.arange(0, parts_at_once)
        indices = first_part + some[:, None] * num_heads + heads[None, :]
        is_part = (some < num_parts)[:, None] & is_head[None, :]
        some_lse = tl.load(
            part_lse + indices, mask=is_part, other=float("-inf"), cache_modifier=".cg"
        )
        some_parts = tl.load(
            parts + indices[:, :, None] * head_size + dims[None, None, :],
            mask=is_part[:, :, None] & (dims[None, None, :] < head_size),
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(top, tl.max(some_lse, 0))
        # Every part has keys, but padding heads have none.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(some_lse - base[None, :])
        shrink = tl.exp(top - base)
        merged = merged * shrink[:, None] + tl.sum(some_parts * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = higher
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + (heads * out_head_stride)[:, None] + dims[None, :],
        (merged / total[:, None]).to(out.dtype.element_ty),
        mask=is_head[:, None] & (dims[None, :] < head_size),
    )
    if has_lse:
        tl.store(lse + heads, top + tl.log(total), mask=is_head)
