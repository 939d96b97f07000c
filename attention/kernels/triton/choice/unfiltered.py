"""Maxima of rows, and sampling from rows without a filter."""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.choice.scores import (
    INF,
    MAX_SPLITS,
    NAN_KEY,
    NO_TOKEN,
    SCALE,
    UNIFORM,
    is_sound,
    keys_of,
    load_scores,
    parameter,
    row_maximum,
    score_of,
    units_of,
)

__all__ = ["draw_unfiltered", "find_maxima", "join_maxima", "sum_chunks", "take_maxima"]


@triton.jit(do_not_specialize=["splits"])
def find_maxima(
    scores: tl.tensor,
    indices: tl.tensor,
    maxima: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Write the largest key and its lowest id of each part of each row.

    `maxima` is int64 `[num_rows, 32]`: the key in the upper half, the inverted id in the lower.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    scores += tl.load(indices + row) * row_stride
    first = split * split_size
    best = tl.full((tile,), -INF, tl.float32)
    best_ids = first + tl.arange(0, tile)
    is_nan = tl.full((tile,), False, tl.int1)
    for start in range(first, tl.minimum(first + split_size, vocab_size), tile):
        values, ids = load_scores(scores, start, vocab_size, tile)
        # Each lane keeps the first of equal scores.
        is_better = values > best
        best = tl.where(is_better, values, best)
        best_ids = tl.where(is_better, ids, best_ids)
        is_nan |= values != values
    keys = tl.where(is_nan, NAN_KEY, keys_of(best, 0))
    # Ids are inverted, so that the maximum has the lowest id among equal keys.
    packed = (keys.to(tl.int64) << 32) | (0x7FFFFFFF - best_ids).to(tl.int64)
    tl.store(maxima + row * MAX_SPLITS + split, tl.max(packed, axis=0))


@triton.jit(do_not_specialize=["splits", "first_id"])
def join_maxima(maxima: tl.tensor, out: tl.tensor, splits: tl.tensor, first_id: tl.tensor) -> None:
    """Write the largest of each row, int64 `[num_rows]`, for ids that begin at `first_id`."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, row_maximum(maxima, row, splits) - first_id)


@triton.jit(do_not_specialize=["splits", "stride"])
def take_maxima(maxima: tl.tensor, out: tl.tensor, splits: tl.tensor, stride: tl.tensor) -> None:
    """Write the likeliest token of each row, int64 `[num_rows]`.

    `maxima` is int64 `[num_rows, stride]`, of which `splits` are set.
    """
    row = tl.program_id(0).to(tl.int64)
    best = row_maximum(maxima, row, splits, stride)
    token_id = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    tl.store(out + row, tl.where(is_sound(best >> 32), token_id, NO_TOKEN))


@triton.jit(do_not_specialize=["splits"])
def sum_chunks(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    chunk_sums: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Write the weight of each part of each row, int64 `[num_rows, 32]`."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    key = (row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not is_sound(key):
        return
    highest = score_of(key, 0)
    scale = parameter(parameters, SCALE, row).to(tl.float32)
    scores += tl.load(indices + row) * row_stride
    first = split * split_size
    units = tl.zeros((tile,), tl.int64)
    for start in range(first, tl.minimum(first + split_size, vocab_size), tile):
        values, _ = load_scores(scores, start, vocab_size, tile)
        units += units_of(values, highest, scale)
    tl.store(chunk_sums + row * MAX_SPLITS + split, tl.sum(units, axis=0))


@triton.jit(do_not_specialize=["splits"])
def draw_unfiltered(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    chunk_sums: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Write the token at the drawn share of the weight of each row, int64 `[num_rows]`."""
    row = tl.program_id(0).to(tl.int64)
    key = (row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not is_sound(key):
        tl.store(out + row, NO_TOKEN)
        return
    highest = score_of(key, 0)
    scale = parameter(parameters, SCALE, row).to(tl.float32)
    scores += tl.load(indices + row) * row_stride
    columns = tl.arange(0, MAX_SPLITS)
    sums = tl.load(chunk_sums + row * MAX_SPLITS + columns, mask=columns < splits, other=0)
    total = tl.sum(sums, axis=0)
    drawn = (parameter(parameters, UNIFORM, row) * total.to(tl.float64)).to(tl.int64)
    drawn = tl.minimum(drawn, total - 1)
    ends = tl.cumsum(sums, axis=0)
    split = tl.sum((ends <= drawn).to(tl.int32), axis=0)
    before = tl.max(tl.where(ends <= drawn, ends, 0), axis=0)
    token_id = tl.full((), -1, tl.int64)
    start = split * split_size
    while token_id < 0:
        values, _ = load_scores(scores, start, vocab_size, tile)
        tile_ends = before + tl.cumsum(units_of(values, highest, scale), axis=0)
        place = tl.sum((tile_ends <= drawn).to(tl.int32), axis=0)
        if place < tile:
            token_id = (start + place).to(tl.int64)
        before = tl.max(tile_ends, axis=0)
        start += tile
    tl.store(out + row, token_id)
