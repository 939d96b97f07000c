"""Launches the attention of one query per sequence over the paged cache."""

from __future__ import annotations

import torch

from attention.kernels.arguments import NUM_ITEM_WORDS, DecodeItems, NewTokens
from attention.kernels.triton.attend_item import attend_item
from attention.kernels.triton.kernel_launcher import RepeatedLaunch, can_depend, launch_options
from attention.kernels.triton.tiles import stride_unit
from attention.kernels.triton.tuning import (
    AttentionOptions,
    PagedAttentionTuning,
    dot_type,
    next_power_of_two,
)

__all__ = ["PagedDecode"]

_FP8_REGISTERS = 168
"""Maximum registers per thread when keys are fp8, so that a multiprocessor runs three programs."""


class PagedDecode:
    """The decodes of one step, for layers with equal layouts.

    Attends for one query per sequence, `[B, num_heads, head_size]`; else as `paged_attention`. A
    query is at the position of its last key, so `window_right` has no effect. Rotates and writes
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
        """`query`, `layer_cache`, `out` and `new` belong to any of the layers.

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
        # Any tensor stands for unused arguments.
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
    """Return the launch of `attend_item`."""
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
        attend_item,
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
