"""The loop that all attention kernels share: a tile of query vectors over a range of keys.

A query vector is one head of one query token. Exponents are in units of log2(e), because exp2 is
one instruction. The state of a vector is that of the online softmax (Milakov and Gimelshein,
2018), all float32: the sum of weighted values, the largest exponent, and the sum of weights
relative to it.

All functions here are device functions of the kernels in `chunk_attention` and `attend_item`,
except `stride_unit`, which the host calls to launch them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

__all__ = [
    "attend",
    "count_sinks",
    "load_slopes",
    "load_vectors",
    "log_sum",
    "mean_values",
    "stride_unit",
    "wide_strides",
]


def stride_unit(keys: torch.Tensor) -> int:
    """Return the power of two, at most 16, that divides all strides but the last.

    Triton only checks whether a stride is a multiple of 16, and loads single elements if it is not.
    Strides are therefore passed divided by the unit, and `wide_strides` multiplies them again.
    """
    return math.gcd(16, *keys.stride()[:-1])


@triton.jit
def wide_strides(
    block_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, unit: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return strides in elements, known to Triton to be multiples of the unit."""
    return block_stride.to(tl.int64) * unit, token_stride * unit, head_stride * unit


@triton.jit
def load_vectors(
    pointer: tl.tensor,
    offsets: tl.tensor,
    is_vector: tl.tensor,
    has_all_vectors: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
) -> tl.tensor:
    """Return the vectors at some offsets, `[vectors, padded_size]`, zero outside of the masks.

    `offsets` is `[vectors]` int64, `is_vector` `[vectors]` bool. Loads queries, keys and values.
    """
    dims = tl.arange(0, padded_size)
    pointers = pointer + offsets[:, None] + dims[None, :]
    # A mask that is always true would still cost a predicate for each load.
    if head_size == padded_size:
        if has_all_vectors:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=is_vector[:, None], other=0.0)
    else:
        if has_all_vectors:
            return tl.load(pointers, mask=dims[None, :] < head_size, other=0.0)
        else:
            return tl.load(
                pointers, mask=is_vector[:, None] & (dims[None, :] < head_size), other=0.0
            )


@triton.jit
def load_slopes(
    slopes: tl.tensor, heads: tl.tensor, is_vector: tl.tensor, has_slopes: tl.constexpr
) -> tl.tensor:
    """Return the ALiBi slope of each vector, `[vectors]` float32 in units of log2(e), or zeros.

    `slopes` points to `[num_heads]` float32, and `heads` is `[vectors]` int32.
    """
    if has_slopes:
        return tl.load(slopes + heads, mask=is_vector, other=0.0) * 1.4426950408889634
    else:
        return tl.zeros_like(heads).to(tl.float32)


@triton.jit
def _tile_blocks(
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
) -> tl.tensor:
    """Return the block of a tile of keys, or of each key if a tile may span blocks.

    `table` points to the block table of the sequence, int32, which is read before `end` only. With
    `block_size` 0 there are no blocks, and the result is not used.
    """
    if block_size == 0:
        return start
    elif block_size % tile_keys == 0:
        return tl.load(table + start // block_size, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, tile_keys)
        return tl.load(table + keys // block_size, mask=keys < end, other=0)


@triton.jit
def _key_offsets(
    blocks: tl.tensor,
    start: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    block_size: tl.constexpr,
    tile_keys: tl.constexpr,
) -> tl.tensor:
    """Return the offsets of the keys of a tile, int64 `[tile_keys]`, from `_tile_blocks`."""
    keys = start + tl.arange(0, tile_keys)
    if block_size == 0:
        return keys.to(tl.int64) * token_stride
    else:
        return blocks.to(tl.int64) * block_stride + (keys % block_size).to(tl.int64) * token_stride


@triton.jit
def _exponents(
    query: tl.tensor,
    key: tl.tensor,
    distance: tl.tensor,
    slopes: tl.tensor,
    dot_scale: tl.tensor,
    cap: tl.tensor,
    has_cap: tl.constexpr,
    has_slopes: tl.constexpr,
) -> tl.tensor:
    """Return exponents without masks, `[vectors, keys]` float32 in units of log2(e).

    `query` is `[vectors, padded_size]`, `key` `[keys, padded_size]`, `distance` `[vectors, keys]`.
    """
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * dot_scale
    if has_cap:
        # tanh from exp2(-2 |x| log2(e)), which cannot overflow.
        shrunk = tl.exp2(tl.abs(scores) * -2.8853900817779268)
        tangent = (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(scores < 0.0, -cap, cap) * tangent
    if has_slopes:
        scores -= slopes[:, None] * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def attend(
    weighted: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    query_positions: tl.tensor,
    slopes: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    first_key: tl.tensor,
    window_left: tl.tensor,
    window_right: tl.tensor,
    dot_scale: tl.tensor,
    cap: tl.tensor,
    is_masked: tl.constexpr,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    has_cap: tl.constexpr,
    has_slopes: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    tile_keys: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the state after the keys from `start`, a multiple of the tile, up to `end`.

    `weighted` is `[vectors, padded_size]`, `top` and `total` are `[vectors]`, all float32; `query`
    is `[vectors, padded_size]` and `query_positions` `[vectors]` int32. `keys` and `values` point
    to the first key and value of the KV head, `table` to the sequence's block table, int32.

    Keys before `first_key` and from `end` on are never read: an unused slot may hold NaN, which a
    weight of 0 does not remove. Without `is_masked`, `end` is a multiple of the tile too, and every
    vector sees every key.
    """
    # Blocks are looked up one tile ahead. If the loads of keys depended on a load of the same
    # iteration, Triton would pipeline fewer of them.
    blocks = _tile_blocks(table, start, end, block_size, tile_keys)
    for tile in range(start, end, tile_keys):
        positions = tile + tl.arange(0, tile_keys)
        is_key = (positions >= first_key) & (positions < end)
        offsets = _key_offsets(blocks, tile, block_stride, token_stride, block_size, tile_keys)
        blocks = _tile_blocks(table, tile + tile_keys, end, block_size, tile_keys)
        key = load_vectors(keys, offsets, is_key, not is_masked, head_size, padded_size)
        value = load_vectors(values, offsets, is_key, not is_masked, head_size, padded_size)
        distance = positions[None, :] - query_positions[:, None]
        scores = _exponents(
            query, key.to(query.dtype), distance, slopes, dot_scale, cap, has_cap, has_slopes
        )
        if is_masked:
            is_visible = is_key[None, :]
            if has_left:
                is_visible = is_visible & (distance >= -window_left)
            if has_right:
                is_visible = is_visible & (distance <= window_right)
            scores = tl.where(is_visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A vector that has seen no key has the maximum -inf, which cannot be subtracted.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        weighted = tl.dot(
            weights.to(query.dtype),
            value.to(query.dtype),
            weighted * shrink[:, None],
            input_precision="ieee",
        )
        top = higher
    return weighted, top, total


@triton.jit
def count_sinks(
    weighted: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    sinks: tl.tensor,
    heads: tl.tensor,
    is_vector: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the state of `attend` after the sinks of all vectors, which have no values.

    `sinks` points to `[num_heads]` float32, and `heads` is `[vectors]` int32.
    """
    exponents = tl.load(sinks + heads, mask=is_vector, other=0.0) * 1.4426950408889634
    higher = tl.maximum(top, exponents)
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.exp2(exponents - higher)
    return weighted * shrink[:, None], higher, total


@triton.jit
def mean_values(weighted: tl.tensor, total: tl.tensor, v_scale: tl.tensor) -> tl.tensor:
    """Return the result of attention, `[vectors, padded_size]` float32; zero without keys."""
    is_empty = total == 0.0
    factor = tl.where(is_empty, 0.0, v_scale / tl.where(is_empty, 1.0, total))
    return weighted * factor[:, None]


@triton.jit
def log_sum(top: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return the natural logarithm of the sum of exponentials, `[vectors]`; -inf without keys."""
    return (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * 0.6931471805599453
