"""The decode kernel: attention of one query per sequence over the paged cache.

Paged attention (Kwon et al., 2023) with the keys of long sequences split among programs
(flash decoding; Dao et al., 2023) and common prefixes read once (Hydragen; Juravsky et al., 2024).
A program computes one work item: a range of keys of one sequence, or of several that share them.
The items are in device memory, because a captured graph is replayed with other lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.kernel_launcher import start_next_kernel, wait_for_inputs
from attention.kernels.triton.norm_rope import rotated
from attention.kernels.triton.tiles import (
    attend,
    count_sinks,
    load_slopes,
    load_vectors,
    log_sum,
    mean_values,
    wide_strides,
)

__all__ = ["attend_item"]

_VECTOR = tl.constexpr(4)
"""Elements of float32 that a thread loads at a time."""


@triton.jit(do_not_specialize=["table_stride"])
def attend_item(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    slopes: tl.tensor,
    sinks: tl.tensor,
    tables: tl.tensor,
    items: tl.tensor,
    parts: tl.tensor,
    part_lse: tl.tensor,
    arrivals: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    rotary_table: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    new_key_stride: tl.tensor,
    new_value_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    lse_row_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    window_left: tl.tensor,
    dot_scale: tl.tensor,
    cap: tl.tensor,
    v_scale: tl.tensor,
    has_left: tl.constexpr,
    has_cap: tl.constexpr,
    has_slopes: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    has_new: tl.constexpr,
    operand_type: tl.constexpr,
    stride_unit: tl.constexpr,
    num_queries_per_kv: tl.constexpr,
    rows_per_item: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    tile_vectors: tl.constexpr,
    tile_keys: tl.constexpr,
    item_words: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Attend for the query heads of one KV head of the rows of an item, over the item's keys.

    Launched by `PagedDecode`; grid `(num_kv_heads, num_items)`. Pointers: query `[B, num_heads,
    head_size]`; keys, values `[num_blocks, block_size, num_kv_heads, head_size]` of the model's
    dtype or fp8; out `[B, num_heads, head_size]`; lse `[B, num_heads]` float32; slopes, sinks
    `[num_heads]` float32; tables `[B, width]` int32; items the words of `DecodeItems`; parts,
    part_lse and arrivals as in `DecodeScratch`. With `has_new`, this kernel rotates the queries and
    the new keys `[B, num_kv_heads, head_size]`, and writes these and the new values to slots `[B]`
    int64: positions `[B]` int64, rotary_table as `table` of `Rotary`.
    """
    # Programs that run at the same time read adjacent heads of the same blocks.
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * (item_words * (1 + rows_per_item))
    num_rows = tl.load(item)
    start = tl.load(item + 1) * tile_keys
    last_tile = tl.load(item + 2)
    split = tl.load(item + 3)
    first_row = tl.load(item + item_words).to(tl.int64)
    num_keys = tl.load(item + item_words + 1)
    num_parts = tl.load(item + item_words + 3)
    vectors = tl.arange(0, tile_vectors)
    places = vectors // num_queries_per_kv
    is_vector = places < num_rows
    if rows_per_item == 1:
        rows = first_row
        vector_keys = tl.zeros([tile_vectors], tl.int32) + num_keys
        first_parts = tl.load(item + item_words + 2)
    else:
        row_words = item + item_words * (1 + places)
        rows = tl.load(row_words, mask=is_vector, other=0).to(tl.int64)
        vector_keys = tl.load(row_words + 1, mask=is_vector, other=0)
        first_parts = tl.load(row_words + 2, mask=is_vector, other=0)
    if num_rows == 0:
        # Return at once, to leave room for programs of the next kernel.
        return
    if has_new:
        only = tl.zeros([1], tl.int64)
        rotary_offset = tl.load(positions + first_row + only) * head_size
        if rows_per_item == 1:
            rotary_offsets = rotary_offset
        else:
            rotary_offsets = tl.load(positions + rows, mask=is_vector, other=0) * head_size
        slot = tl.load(slots + first_row)
    # Everything above was uploaded before the step, so it may be read before the wait.
    wait_for_inputs(is_dependent, starts_next=False)

    block_stride, token_stride, head_stride = wide_strides(
        block_stride, token_stride, head_stride, stride_unit
    )
    heads = kv_head * num_queries_per_kv + vectors % num_queries_per_kv
    end = min(last_tile * tile_keys, num_keys)
    first_key = 0
    if has_left:
        first_key = max(num_keys - 1 - window_left, 0)
    vector_slopes = load_slopes(slopes, heads, is_vector, has_slopes)
    queries = rows * query_row_stride + heads * query_head_stride
    if has_new:
        q = load_rotated_vectors(query, queries, is_vector, rotary_table, rotary_offsets, head_size)
        # Only the program with the sequence's last keys reads the new key and value in this launch.
        if (start < end) & (end == num_keys) & (slot >= 0):
            place = slot // block_size * block_stride + slot % block_size * token_stride
            place += kv_head * head_stride + tl.arange(0, head_size)
            new_key = first_row * new_key_stride + kv_head * head_size + only
            rotated = load_rotated_vectors(
                new_keys, new_key, only == 0, rotary_table, rotary_offset, head_size
            )
            tl.store(keys + place, tl.reshape(rotated, [head_size]))
            new_value = first_row * new_value_stride + kv_head * head_size
            tl.store(values + place, tl.load(new_values + new_value + tl.arange(0, head_size)))
            tl.debug_barrier()
    else:
        q = load_vectors(query, queries, is_vector, False, head_size, padded_size)
    q = q.to(operand_type)
    # Not earlier: the loads of a query depend on each other, and the next kernel's first loads
    # would delay them.
    start_next_kernel(is_dependent)
    weighted, top, total = attend(
        tl.zeros([tile_vectors, padded_size], tl.float32),
        tl.full([tile_vectors], float("-inf"), tl.float32), tl.zeros([tile_vectors], tl.float32), q,
        vector_keys - 1, vector_slopes, keys + kv_head * head_stride,
        values + kv_head * head_stride, tables + first_row * table_stride, block_stride,
        token_stride, start, end, first_key, 0, 0, dot_scale, cap, True, False, False, has_cap,
        has_slopes, block_size, head_size, padded_size, tile_keys,
    )  # fmt: skip

    dims = tl.arange(0, padded_size)
    is_stored = is_vector[:, None] & (dims[None, :] < head_size)
    if has_sinks:  # noqa: SIM102  # without sinks nothing of this is compiled
        if num_parts == 1:
            weighted, top, total = count_sinks(weighted, top, total, sinks, heads, is_vector)
    result = mean_values(weighted, total, v_scale)
    result_lse = log_sum(top, total)
    if num_parts == 1:
        out_offsets = rows * out_row_stride + heads * out_head_stride
        tl.store(
            out + out_offsets[:, None] + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=is_stored,
        )
        if has_lse:
            tl.store(lse + rows * lse_row_stride + heads, result_lse, mask=is_vector)
    else:
        num_heads = tl.num_programs(0) * num_queries_per_kv
        part = first_parts.to(tl.int64) + split
        part_heads = part * num_heads + heads
        tl.store(parts + part_heads[:, None] * head_size + dims[None, :], result, mask=is_stored)
        tl.store(part_lse + part_heads, result_lse, mask=is_vector)
        # With one row per item there are few programs, so each may use more registers.
        is_small: tl.constexpr = triton.next_power_of_2(num_queries_per_kv) * padded_size <= 1024
        parts_at_once: tl.constexpr = 8 if rows_per_item == 1 and is_small else 4
        # All threads must have stored their part before it is counted as complete.
        tl.debug_barrier()
        for place in range(0, num_rows):
            merged = item + item_words * (1 + place)
            row = tl.load(merged).to(tl.int64)
            num_row_parts = tl.load(merged + 3)
            counter = arrivals + row * tl.num_programs(0) + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_row_parts - 1:
                tl.store(counter, 0)
                merge_parts(
                    parts, part_lse, out + row * out_row_stride, lse + row * lse_row_stride, sinks,
                    tl.load(merged + 2).to(tl.int64) * num_heads, num_row_parts, num_heads,
                    kv_head * num_queries_per_kv, out_head_stride, has_sinks, has_lse,
                    num_queries_per_kv, head_size, padded_size, parts_at_once,
                )  # fmt: skip


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
    `parts_at_once` is limited by the registers. Loads bypass the L1 cache, because
    other programs may have written the parts.
    """
    padded_heads: tl.constexpr = triton.next_power_of_2(num_merged_heads)
    # Each row is a vector of a thread, so that no sum is over threads.
    row_vectors: tl.constexpr = padded_size // _VECTOR
    rows = tl.arange(0, padded_heads * row_vectors)
    heads = rows // row_vectors
    is_head = heads < num_merged_heads
    heads += first_head
    dims = (rows % row_vectors * _VECTOR)[:, None] + tl.arange(0, _VECTOR)[None, :]
    is_dim = is_head[:, None] & (dims < head_size)
    top = tl.full([padded_heads * row_vectors], float("-inf"), tl.float32)
    total = tl.zeros([padded_heads * row_vectors], tl.float32)
    merged = tl.zeros([padded_heads * row_vectors, _VECTOR], tl.float32)
    if has_sinks:
        top = tl.load(sinks + heads, mask=is_head, other=0.0)
        total += 1.0
    for first in range(0, num_parts, parts_at_once):
        some_parts = ()
        for place in tl.static_range(parts_at_once):
            indices = first_part + (first + place) * num_heads + heads
            # Triton can only add tuples.
            some_parts = some_parts + (  # type: ignore[assignment]  # noqa: RUF005
                tl.load(
                    parts + indices[:, None] * head_size + dims,
                    mask=(first + place < num_parts) & is_dim,
                    other=0.0,
                    cache_modifier=".cg",
                ),
            )
        # All these loads are on their way before the first product waits.
        tl.debug_barrier()
        some_lse = ()
        for place in tl.static_range(parts_at_once):
            some_lse = some_lse + (  # type: ignore[assignment]  # noqa: RUF005
                tl.load(
                    part_lse + first_part + (first + place) * num_heads + heads,
                    mask=(first + place < num_parts) & is_head,
                    other=float("-inf"),
                    cache_modifier=".cg",
                ),
            )
        higher = top
        for place in tl.static_range(parts_at_once):
            higher = tl.maximum(higher, some_lse[place])
        # Every part has keys, but padding heads have none.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(top - base)
        merged *= shrink[:, None]
        total *= shrink
        for place in tl.static_range(parts_at_once):
            weights = tl.exp(some_lse[place] - base)
            merged += some_parts[place] * weights[:, None]
            total += weights
        top = higher
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + (heads * out_head_stride)[:, None] + dims,
        (merged / total[:, None]).to(out.dtype.element_ty),
        mask=is_dim,
    )
    if has_lse:
        is_first = is_head & (rows % row_vectors == 0)
        tl.store(lse + heads, top + tl.log(total), mask=is_first)


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
