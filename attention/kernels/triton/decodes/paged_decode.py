"""Attention of one query per sequence over the paged cache.

What a program computes is an item of a schedule on the device, since a captured graph is replayed
with other lengths: keys of one sequence, or of several that share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.decode_items import NUM_ITEM_WORDS
from attention.kernels.triton.decodes.merged_parts import merge_parts
from attention.kernels.triton.decodes.rotated_vectors import load_rotated_vectors
from attention.kernels.triton.dependent_launch import (
    can_depend,
    launch_options,
    start_next_kernel,
    wait_for_inputs,
)
from attention.kernels.triton.repeated_launch import RepeatedLaunch
from attention.kernels.triton.tiles import (
    attend,
    count_sinks,
    dot_type,
    load_slopes,
    load_vectors,
    log_sum,
    mean_values,
    stride_unit,
    wide_strides,
)
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.decode_items import DecodeItems
    from attention.kernels.new_tokens import NewTokens
    from attention.kernels.triton.options import AttentionOptions
    from attention.kernels.triton.tuning import PagedAttentionTuning

__all__ = ["PagedDecode", "paged_decode"]

_FP8_REGISTERS = 168
"""Of a thread that converts keys from fp8, so that three programs run on a multiprocessor."""


@triton.jit(do_not_specialize=["table_stride"])
def _attend_item(
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
    turns: tl.tensor,
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
    `[num_heads]` float32; tables `[B, width]` int32; items as the words of `DecodeItems`; parts,
    part_lse and arrivals as in `DecodeScratch`. With `has_new`, the queries are not rotated, and
    the last keys and values, `[B, num_kv_heads, head_size]`, are written here, at slots `[B]`
    int64: positions `[B]` int64, turns as `table` of `Rotary`.
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
        # At once, since the next kernel can start only where programs of this one leave room.
        return
    if has_new:
        only = tl.zeros([1], tl.int64)
        angle = tl.load(positions + first_row + only) * head_size
        if rows_per_item == 1:
            angles = angle
        else:
            angles = tl.load(positions + rows, mask=is_vector, other=0) * head_size
        slot = tl.load(slots + first_row)
    # What is read so far was there before the step began.
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
        q = load_rotated_vectors(query, queries, is_vector, turns, angles, head_size)
        # The program of the last keys alone reads what it writes.
        if (start < end) & (end == num_keys) & (slot >= 0):
            place = slot // block_size * block_stride + slot % block_size * token_stride
            place += kv_head * head_stride + tl.arange(0, head_size)
            new_key = first_row * new_key_stride + kv_head * head_size + only
            rotated = load_rotated_vectors(new_keys, new_key, only == 0, turns, angle, head_size)
            tl.store(keys + place, tl.reshape(rotated, [head_size]))
            new_value = first_row * new_value_stride + kv_head * head_size
            tl.store(values + place, tl.load(new_values + new_value + tl.arange(0, head_size)))
            tl.debug_barrier()
    else:
        q = load_vectors(query, queries, is_vector, False, head_size, padded_size)
    q = q.to(operand_type)
    # Not before, since to read a query takes several reads in turn.
    start_next_kernel(is_dependent)
    weighted, top, total = attend(
        tl.zeros([tile_vectors, padded_size], tl.float32),
        tl.full([tile_vectors], float("-inf"), tl.float32),
        tl.zeros([tile_vectors], tl.float32),
        q,
        vector_keys - 1,
        vector_slopes,
        keys + kv_head * head_stride,
        values + kv_head * head_stride,
        tables + first_row * table_stride,
        block_stride,
        token_stride,
        start,
        end,
        first_key,
        0,
        0,
        dot_scale,
        cap,
        True,
        False,
        False,
        has_cap,
        has_slopes,
        block_size,
        head_size,
        padded_size,
        tile_keys,
    )

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
        tl.store(
            parts + part_heads[:, None] * head_size + dims[None, :],
            result,
            mask=is_stored,
        )
        tl.store(part_lse + part_heads, result_lse, mask=is_vector)
        # A single row has few programs, which may therefore use more registers.
        lone: tl.constexpr = 32 // triton.next_power_of_2(num_queries_per_kv)
        parts_at_once: tl.constexpr = max(4, lone) if rows_per_item == 1 else 4
        # All threads have stored before one of them counts the part.
        tl.debug_barrier()
        for place in range(0, num_rows):
            merged = item + item_words * (1 + place)
            row = tl.load(merged).to(tl.int64)
            num_row_parts = tl.load(merged + 3)
            counter = arrivals + row * tl.num_programs(0) + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_row_parts - 1:
                tl.store(counter, 0)
                merge_parts(
                    parts,
                    part_lse,
                    out + row * out_row_stride,
                    lse + row * lse_row_stride,
                    sinks,
                    tl.load(merged + 2).to(tl.int64) * num_heads,
                    num_row_parts,
                    num_heads,
                    kv_head * num_queries_per_kv,
                    out_head_stride,
                    has_sinks,
                    has_lse,
                    num_queries_per_kv,
                    head_size,
                    padded_size,
                    parts_at_once,
                )


class PagedDecode:
    """The decodes of one step, for layers whose tensors have the same layouts.

    Attends for one query per sequence, `[B, num_heads, head_size]`; else as `paged_attention`. A
    query is at the position of its last key, so `window_right` has no effect. It rotates and writes
    new tokens itself if they are given.
    """

    def __init__(
        self,
        query: torch.Tensor,
        layer_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        block_tables: torch.Tensor,
        items: DecodeItems,
        options: AttentionOptions,
        tuning: PagedAttentionTuning,
        lse: torch.Tensor | None = None,
        has_sinks: bool = False,
        new: NewTokens | None = None,
    ) -> None:
        """`query`, `layer_cache`, `out` and `new` are those of any of the layers.

        `has_sinks` says whether each launch is given sinks.
        """
        assert block_tables.dtype == torch.int32
        assert query.stride(2) == out.stride(2) == layer_cache.stride(4) == 1
        assert lse is None or (lse.dtype == torch.float32 and lse.stride(1) == 1)
        self._layouts = _layouts(query, layer_cache, out, new)
        self._options = options
        self._lse = lse
        self._has_sinks = has_sinks
        slopes = options.alibi_slopes
        self._slopes = block_tables if slopes is None else slopes
        self._step = block_tables, *_item_tensors(items, query, layer_cache)
        self._attend = _attend_launch(
            query,
            layer_cache,
            out,
            lse,
            table_stride=block_tables.stride(0),
            items=items,
            has_sinks=has_sinks,
            options=options,
            tuning=tuning,
            new=new,
        )

    def fits(
        self,
        query: torch.Tensor,
        layer_cache: torch.Tensor,
        out: torch.Tensor,
        options: AttentionOptions,
        new: NewTokens | None,
    ) -> bool:
        """Return whether a layer has the same layouts and options."""
        is_alike = _layouts(query, layer_cache, out, new) == self._layouts
        return is_alike and options is self._options

    def launch(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        new: NewTokens | None = None,
    ) -> None:
        """Attend; keys and values are `layer_cache[:, 0]` and `layer_cache[:, 1]`.

        `new` is given if it was at first.
        """
        assert self._has_sinks == (sinks is not None)
        # What a kernel does not use is any tensor.
        unused = self._step[0]
        lse = unused if self._lse is None else self._lse
        sinks = unused if sinks is None else sinks
        if new is None:
            new_tokens = query, query, unused, unused, unused
        else:
            new_tokens = new.key, new.value, new.slots, new.rotary.positions, new.rotary.table
        self._attend.launch(
            query, keys, values, out, lse, self._slopes, sinks, *self._step, *new_tokens
        )


def paged_decode(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    items: DecodeItems,
    options: AttentionOptions,
    tuning: PagedAttentionTuning,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    new: NewTokens | None = None,
) -> None:
    """Attend as `PagedDecode` does, for one layer."""
    decode = PagedDecode(
        query,
        layer_cache,
        out,
        block_tables=block_tables,
        items=items,
        options=options,
        tuning=tuning,
        lse=lse,
        has_sinks=sinks is not None,
        new=new,
    )
    decode.launch(query, layer_cache[:, 0], layer_cache[:, 1], out, sinks, new)


def _attend_launch(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    table_stride: int,
    items: DecodeItems,
    has_sinks: bool,
    options: AttentionOptions,
    tuning: PagedAttentionTuning,
    new: NewTokens | None,
) -> RepeatedLaunch:
    """Return the launch of `_attend_item`."""
    _, num_heads, head_size = query.shape
    _, _, block_size, num_kv_heads, _ = layer_cache.shape
    num_queries_per_kv = num_heads // num_kv_heads
    num_items, num_words = items.words.shape
    rows_per_item = num_words // NUM_ITEM_WORDS - 1
    assert num_heads == num_queries_per_kv * num_kv_heads
    assert rows_per_item * num_queries_per_kv <= tuning.tile_vectors
    unit = stride_unit(layer_cache)
    limits = {"maxnreg": _FP8_REGISTERS} if query.is_cuda and layer_cache.itemsize == 1 else {}
    return RepeatedLaunch(
        _attend_item,
        (num_kv_heads, num_items, 1),
        (
            query.stride(0),
            query.stride(1),
            *_new_strides(new, layer_cache),
            out.stride(0),
            out.stride(1),
            0 if lse is None else lse.stride(0),
            layer_cache.stride(0) // unit,
            layer_cache.stride(2) // unit,
            layer_cache.stride(3) // unit,
            table_stride,
            options.window_left,
            options.dot_scale,
            options.cap,
            options.v_scale,
            options.window_left >= 0,
            options.soft_cap is not None,
            options.alibi_slopes is not None,
            has_sinks,
            lse is not None,
            new is not None,
            dot_type(query),
            unit,
            num_queries_per_kv,
            rows_per_item,
            block_size,
            head_size,
            _padded_size(head_size),
            tuning.tile_vectors,
            tuning.tile_keys,
            NUM_ITEM_WORDS,
            can_depend(query.device),
        ),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **limits,
        **launch_options(query.device),
    )


def _item_tensors(
    items: DecodeItems, query: torch.Tensor, layer_cache: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of the items and their scratch memory, as the kernel takes them."""
    num_rows, num_heads, head_size = query.shape
    parts, arrivals = items.scratch.parts, items.scratch.arrivals
    num_results = items.max_parts * num_heads * head_size
    assert items.words.dtype == arrivals.dtype == torch.int32
    assert items.words.is_contiguous()
    assert parts.dtype == torch.float32
    assert parts.numel() >= num_results + items.max_parts * num_heads
    assert arrivals.numel() >= num_rows * layer_cache.shape[3]
    return items.words, parts, parts[num_results:], arrivals


def _new_strides(new: NewTokens | None, layer_cache: torch.Tensor) -> tuple[int, int]:
    """Return the strides from token to token of new keys and values."""
    if new is None:
        return 0, 0
    head_size = layer_cache.shape[4]
    assert head_size == _padded_size(head_size) == new.rotary.table.shape[1]
    assert layer_cache.dtype == new.key.dtype == new.value.dtype
    assert new.key.stride()[1:] == new.value.stride()[1:] == (head_size, 1)
    assert new.slots.dtype == new.rotary.positions.dtype == torch.int64
    assert new.rotary.table.is_contiguous()
    return new.key.stride(0), new.value.stride(0)


def _layouts(
    query: torch.Tensor, layer_cache: torch.Tensor, out: torch.Tensor, new: NewTokens | None
) -> tuple[tuple[int, ...], ...]:
    layouts = query.stride(), layer_cache.stride(), out.stride()
    return layouts if new is None else (*layouts, *new.layouts)


def _padded_size(head_size: int) -> int:
    return max(16, next_power_of_two(head_size))
