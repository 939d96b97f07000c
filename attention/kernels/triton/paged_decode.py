"""Attention of one query per sequence over the paged cache, its keys split over programs.

The launch determines the number of splits, and the number of keys on the device their sizes, since
a captured graph is replayed with other lengths (flash decoding; Dao et al., 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.triton.dependent_launch import (
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.repeated_launch import RepeatedLaunch
from attention.kernels.triton.rotated_vectors import load_rotated_vectors
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
from attention.kernels.triton.tuning import PagedAttentionTuning, next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.new_tokens import NewTokens
    from attention.kernels.triton.options import AttentionOptions

__all__ = ["PagedDecode", "num_scratch_elements", "paged_decode"]

_MERGED_SPLITS = 8
"""Splits that `_merge_splits` has in registers at a time."""


@triton.jit
def _attend_split(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    slopes: tl.tensor,
    sinks: tl.tensor,
    seq_lens: tl.tensor,
    tables: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    turns: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    new_key_stride: tl.tensor,
    new_value_stride: tl.tensor,
    part_stride: tl.tensor,
    out_head_stride: tl.tensor,
    part_lse_stride: tl.tensor,
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
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    tile_vectors: tl.constexpr,
    tile_keys: tl.constexpr,
    min_split_tiles: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Attend for one query over one split of its keys, for the query heads of one KV head.

    Launched by `paged_decode`; grid `(num_kv_heads, num_splits, num_sequences)`. Pointers: query
    `[B, num_heads, head_size]`; keys, values `[num_blocks, block_size, num_kv_heads, head_size]` of
    the model's dtype or fp8; out `[B * num_splits, num_heads, head_size]`, the result or float32
    parts; lse `[B * num_splits, num_heads]` float32; slopes, sinks `[num_heads]` float32; seq_lens
    `[B]` int32; tables `[B, width]` int32. Sinks are counted here only if there are no splits.
    With `has_new`, the queries are not rotated, and the last keys and values, `[B, num_kv_heads,
    head_size]`, are written here, at slots `[B]` int64: positions `[B]` int64, turns as `table` of
    `Rotary`.
    """
    wait_for_inputs(is_dependent)
    block_stride, token_stride, head_stride = wide_strides(
        block_stride, token_stride, head_stride, stride_unit
    )
    # Programs that run at the same time read adjacent heads of the same blocks.
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    num_splits = tl.num_programs(1)
    num_keys = tl.load(seq_lens + sequence)
    first_key = 0
    if has_left:
        first_key = max(num_keys - 1 - window_left, 0)
    first_tile = first_key // tile_keys
    num_tiles = tl.cdiv(num_keys, tile_keys) - first_tile
    split_tiles = max(tl.cdiv(num_tiles, num_splits), min_split_tiles)
    start = (first_tile + split * split_tiles) * tile_keys
    end = min(start + split_tiles * tile_keys, num_keys)

    vectors = tl.arange(0, tile_vectors)
    heads = kv_head * num_queries_per_kv + vectors
    is_vector = vectors < num_queries_per_kv
    queries = sequence.to(tl.int64) * query_token_stride + heads * query_head_stride
    if has_new:
        turns += tl.load(positions + sequence) * head_size
        q = load_rotated_vectors(query, queries, is_vector, turns, head_size)
        slot = tl.load(slots + sequence)
        # The program of the last keys alone reads what it writes.
        if (start < end) & (end == num_keys) & (slot >= 0):
            place = slot // block_size * block_stride + slot % block_size * token_stride
            place += kv_head * head_stride + tl.arange(0, head_size)
            only = tl.arange(0, 1)
            new_key = sequence.to(tl.int64) * new_key_stride + kv_head * head_size + only
            rotated = load_rotated_vectors(new_keys, new_key, only == 0, turns, head_size)
            tl.store(keys + place, tl.reshape(rotated, [head_size]))
            new_value = sequence.to(tl.int64) * new_value_stride + kv_head * head_size
            tl.store(values + place, tl.load(new_values + new_value + tl.arange(0, head_size)))
            tl.debug_barrier()
    else:
        q = load_vectors(query, queries, is_vector, False, head_size, padded_size)
    q = q.to(operand_type)
    vector_slopes = load_slopes(slopes, heads, is_vector, has_slopes)
    weighted, top, total = attend(
        tl.zeros([tile_vectors, padded_size], tl.float32),
        tl.full([tile_vectors], float("-inf"), tl.float32),
        tl.zeros([tile_vectors], tl.float32),
        q,
        tl.zeros([tile_vectors], tl.int32) + num_keys - 1,
        vector_slopes,
        keys + kv_head * head_stride,
        values + kv_head * head_stride,
        tables + sequence.to(tl.int64) * table_stride,
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

    if has_sinks:
        weighted, top, total = count_sinks(weighted, top, total, sinks, heads, is_vector)
    # Parts are [sequence, split]; without splits, tokens.
    part = (sequence * num_splits + split).to(tl.int64)
    dims = tl.arange(0, padded_size)
    out_offsets = part * part_stride + heads * out_head_stride
    tl.store(
        out + out_offsets[:, None] + dims[None, :],
        mean_values(weighted, total, v_scale).to(out.dtype.element_ty),
        mask=is_vector[:, None] & (dims[None, :] < head_size),
    )
    if has_lse:
        tl.store(lse + part * part_lse_stride + heads, log_sum(top, total), mask=is_vector)


@triton.jit
def _merge_splits(
    parts: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    lse_token_stride: tl.tensor,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    num_splits: tl.constexpr,
    padded_splits: tl.constexpr,
    merged_splits: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Merge the parts of one head of one query, weighted by their sums of exponentials.

    Launched by `paged_decode`; grid `(num_heads, num_sequences)`. Pointers: parts
    `[B, num_splits, num_heads, head_size]` and part_lse `[B, num_splits, num_heads]`, float32, from
    `_attend_split`; out `[B, num_heads, head_size]`; lse `[B, num_heads]` float32; sinks
    `[num_heads]` float32.
    """
    wait_for_inputs(is_dependent)
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    sequence = tl.program_id(1).to(tl.int64)
    first_part = sequence * num_splits * num_heads + head
    splits = tl.arange(0, padded_splits)
    all_lse = tl.load(
        part_lse + first_part + splits * num_heads, mask=splits < num_splits, other=float("-inf")
    )
    top = tl.max(all_lse, 0)
    if has_sinks:
        sink = tl.load(sinks + head)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(all_lse - base), 0)
    if has_sinks:
        total += tl.exp(sink - base)

    dims = tl.arange(0, padded_size)
    merged = tl.zeros([padded_size], tl.float32)
    for first_split in range(0, num_splits, merged_splits):
        some = first_split + tl.arange(0, merged_splits)
        indices = first_part + some * num_heads
        some_lse = tl.load(part_lse + indices, mask=some < num_splits, other=float("-inf"))
        part = tl.load(
            parts + indices[:, None] * head_size + dims[None, :],
            mask=(some_lse > float("-inf"))[:, None] & (dims[None, :] < head_size),
            other=0.0,
        )
        merged += tl.sum(part * tl.exp(some_lse - base)[:, None], 0)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + sequence * out_token_stride + head * out_head_stride + dims,
        (merged / total).to(out.dtype.element_ty),
        mask=dims < head_size,
    )
    if has_lse:
        tl.store(lse + sequence * lse_token_stride + head, top + tl.log(total))


def num_scratch_elements(
    *, num_sequences: int, num_heads: int, head_size: int, num_splits: int
) -> int:
    """Return how many float32 elements of scratch memory a decode needs."""
    num_parts = num_sequences * num_heads * num_splits
    return num_parts * (head_size + 1) if num_splits > 1 else 0


class _Parts:
    """The results of the splits, in scratch memory, and the launch that merges them."""

    def __init__(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        has_sinks: bool,
        num_splits: int,
        scratch: torch.Tensor,
    ) -> None:
        num_sequences, num_heads, head_size = query.shape
        num_parts = num_sequences * num_splits * num_heads
        assert scratch.dtype == torch.float32
        assert scratch.is_contiguous()
        assert scratch.numel() >= num_parts * (head_size + 1)
        self.out = scratch
        self.lse = scratch[num_parts * head_size :]
        self.strides = num_heads * head_size, head_size, num_heads
        """From part to part and from head to head of `out`, and from part to part of `lse`."""
        self._merge = RepeatedLaunch(
            _merge_splits,
            (num_heads, num_sequences, 1),
            (
                *_token_strides(out, lse),
                has_sinks,
                lse is not None,
                num_splits,
                next_power_of_two(num_splits),
                min(_MERGED_SPLITS, next_power_of_two(num_splits)),
                head_size,
                _padded_size(head_size),
                can_depend(query.device),
            ),
            num_warps=2,
            **launch_options(query.device),
        )

    def merge(self, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
        """Merge them into `out` and, if `lse` was given at first, into `lse`."""
        self._merge.launch(self.out, self.lse, out, lse, sinks)


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
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        options: AttentionOptions,
        tuning: PagedAttentionTuning,
        scratch: torch.Tensor,
        lse: torch.Tensor | None = None,
        has_sinks: bool = False,
        new: NewTokens | None = None,
    ) -> None:
        """`query`, `layer_cache`, `out` and `new` are those of any of the layers.

        `scratch` is float32 of at least `num_scratch_elements`; launches on one stream may share
        it. `has_sinks` says whether each launch is given sinks.
        """
        assert seq_lens.dtype == block_tables.dtype == torch.int32
        assert query.stride(2) == out.stride(2) == layer_cache.stride(4) == 1
        assert lse is None or (lse.dtype == torch.float32 and lse.stride(1) == 1)
        self._layouts = _layouts(query, layer_cache, out, new)
        self._options = options
        self._lse = lse
        self._has_sinks = has_sinks
        slopes = options.alibi_slopes
        self._step = seq_lens if slopes is None else slopes, seq_lens, block_tables
        self._parts: _Parts | None = None
        self._attend: RepeatedLaunch | None = None
        if not len(query):
            return
        part_strides = _token_strides(out, lse)
        if tuning.num_splits > 1:
            self._parts = _Parts(
                query,
                out,
                lse,
                has_sinks=has_sinks,
                num_splits=tuning.num_splits,
                scratch=scratch,
            )
            part_strides = self._parts.strides
        self._attend = _attend_launch(
            query,
            layer_cache,
            part_strides,
            table_stride=block_tables.stride(0),
            has_sinks=has_sinks and tuning.num_splits == 1,
            has_lse=lse is not None or tuning.num_splits > 1,
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
        if self._attend is None:
            return
        # What a kernel does not use is any tensor.
        lse = out if self._lse is None else self._lse
        slopes, seq_lens, block_tables = self._step
        sinks = seq_lens if sinks is None else sinks
        step: tuple[torch.Tensor, ...] = slopes, sinks, seq_lens, block_tables
        if new is None:
            step += (query, query, seq_lens, seq_lens, seq_lens)
        else:
            step += (new.key, new.value, new.slots, new.rotary.positions, new.rotary.table)
        parts = self._parts
        if parts is None:
            self._attend.launch(query, keys, values, out, lse, *step)
            return
        self._attend.launch(query, keys, values, parts.out, parts.lse, *step)
        parts.merge(out, lse, sinks)


def paged_decode(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    *,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    options: AttentionOptions,
    tuning: PagedAttentionTuning,
    scratch: torch.Tensor,
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
        seq_lens=seq_lens,
        block_tables=block_tables,
        options=options,
        tuning=tuning,
        scratch=scratch,
        lse=lse,
        has_sinks=sinks is not None,
        new=new,
    )
    decode.launch(query, layer_cache[:, 0], layer_cache[:, 1], out, sinks, new)


def _attend_launch(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    part_strides: tuple[int, int, int],
    *,
    table_stride: int,
    has_sinks: bool,
    has_lse: bool,
    options: AttentionOptions,
    tuning: PagedAttentionTuning,
    new: NewTokens | None,
) -> RepeatedLaunch:
    """Return the launch of `_attend_split`, which writes the result or, with splits, parts."""
    num_sequences, num_heads, head_size = query.shape
    _, _, block_size, num_kv_heads, _ = layer_cache.shape
    num_queries_per_kv = num_heads // num_kv_heads
    assert num_heads == num_queries_per_kv * num_kv_heads <= tuning.tile_vectors * num_kv_heads
    unit = stride_unit(layer_cache)
    return RepeatedLaunch(
        _attend_split,
        (num_kv_heads, tuning.num_splits, num_sequences),
        (
            query.stride(0),
            query.stride(1),
            *_new_strides(new, layer_cache),
            *part_strides,
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
            has_lse,
            new is not None,
            dot_type(query),
            unit,
            num_queries_per_kv,
            block_size,
            head_size,
            _padded_size(head_size),
            tuning.tile_vectors,
            tuning.tile_keys,
            -(-tuning.min_split_keys // tuning.tile_keys),
            can_depend(query.device),
        ),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **launch_options(query.device),
    )


def _token_strides(out: torch.Tensor, lse: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the strides from token to token and from head to head of `out`, and of `lse`."""
    return out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)


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
