"""Estimates from a sample of each row where its cuts lie.

The memory is that of `attention.kernels.triton.choice.threshold_search`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.choice.scores import (
    INF,
    MAX_SPLITS,
    TOP_K,
    TOP_P,
    UNIT,
    floor_key,
    is_sound,
    keys_of,
    parameter,
    row_maximum,
    score_of,
    weight_scale,
)

__all__ = ["ALL_UNITS", "edges_within", "start_search", "store_bracket", "store_edges"]

NO_EDGE = tl.constexpr(0x7FFFFFFF)
ALL_UNITS = tl.constexpr(1 << 62)
RUN = tl.constexpr(32)
"""Consecutive tokens of a sample."""


@triton.jit
def edges_within(
    keys: tl.tensor,
    sums: tl.tensor,
    squares: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    margin: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return two keys, probably just below and above the key at these shares of a bracket."""
    places = tl.arange(0, keys.shape[0])
    first_place = tl.sum((keys >= high).to(tl.int32), axis=0)
    last_place = tl.sum((keys >= low).to(tl.int32), axis=0) - 1
    above = tl.max(tl.where(keys >= high, sums, 0.0), axis=0)
    mass = tl.maximum(tl.max(tl.where(keys >= low, sums, 0.0), axis=0) - above, 1e-30)
    spread = tl.max(tl.where(keys >= low, squares, 0.0), axis=0)
    spread -= tl.max(tl.where(keys >= high, squares, 0.0), axis=0)
    variance = tl.minimum(tl.maximum(spread / mass / mass, 0.0), 1.0)
    least = tl.minimum(tl.maximum(least, 0.0), 1.0)
    most = tl.minimum(tl.maximum(most, 0.0), 1.0)
    middle = (least + most) * 0.5
    # Three standard deviations of the share, as estimated from a sample of this variance.
    error = 3.0 * tl.sqrt(middle * (1.0 - middle) * variance) + 2.0 * variance
    first = tl.sum((sums <= above + (least - error) * mass).to(tl.int32), axis=0)
    last = tl.sum((sums < above + (most + error) * mass).to(tl.int32), axis=0)
    # A sample has too few of the likeliest tokens of a bracket to tell their weight.
    first = tl.minimum(tl.maximum(first, first_place + margin), last_place)
    last = tl.minimum(tl.maximum(last, first), last_place)
    upper = tl.sum(tl.where(places == first, keys, 0), axis=0) + 1
    lower = tl.sum(tl.where(places == last, keys, 0), axis=0)
    if last_place - first_place < 2 * margin:
        third = ((high.to(tl.int64) - low.to(tl.int64)) // 3).to(tl.int32)
        lower = low + third
        upper = high - third
    upper = tl.minimum(tl.maximum(upper, low + 1), high - 1)
    lower = tl.minimum(tl.maximum(lower, low + 1), upper)
    return lower, upper


@triton.jit
def _edges_around(
    keys: tl.tensor,
    sums: tl.tensor,
    squares: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    above: tl.tensor,
    mass: tl.tensor,
    margin: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return two keys, probably just below and above the key with so much weight above it.

    `mass` is the expected weight of the sample between `low` and `high`. The key is searched from
    above, or from below by the rest of that weight, since a sample estimates the weight of many
    unlikely tokens more exactly than the weight of a few likely tokens.
    """
    places = tl.arange(0, keys.shape[0])
    is_kept = keys >= low
    last_place = tl.sum(is_kept.to(tl.int32), axis=0) - 1
    sampled = tl.max(tl.where(is_kept, sums, 0.0), axis=0)
    spread = tl.max(tl.where(is_kept, squares, 0.0), axis=0)
    from_below = sampled - (mass - above)
    spread_above = tl.max(tl.where(sums <= above, squares, 0.0), axis=0)
    spread_below = spread - tl.max(tl.where(sums <= from_below, squares, 0.0), axis=0)
    target = tl.where(spread_above < spread_below, above, from_below)
    # Three standard deviations.
    error = 3.0 * tl.sqrt(tl.maximum(tl.minimum(spread_above, spread_below), 0.0))
    first = tl.sum((sums <= target - error).to(tl.int32), axis=0)
    last = tl.sum((sums < target + error).to(tl.int32), axis=0)
    # A sample has too few of the likeliest tokens to tell their weight.
    first = tl.minimum(tl.maximum(first, margin), last_place)
    last = tl.minimum(tl.maximum(last, first) + 1, last_place)
    upper = tl.sum(tl.where(places == first, keys, 0), axis=0) + 1
    lower = tl.sum(tl.where(places == last, keys, 0), axis=0)
    upper = tl.minimum(tl.maximum(upper, low + 1), high - 1)
    lower = tl.minimum(tl.maximum(lower, low + 1), upper)
    return lower, upper


@triton.jit
def store_edges(
    edge_keys: tl.tensor,
    edges: tl.tensor,
    at: tl.tensor,
    is_open: tl.tensor,
    lower: tl.tensor,
    upper: tl.tensor,
    shift: tl.constexpr,
) -> None:
    """Store two edges; the edges of a closed bracket are above all scores."""
    tl.store(edge_keys + at, tl.where(is_open, lower, NO_EDGE))
    tl.store(edge_keys + at + 1, tl.where(is_open, upper, NO_EDGE))
    tl.store(edges + at, tl.where(is_open, score_of(lower, shift), INF))
    tl.store(edges + at + 1, tl.where(is_open, score_of(upper, shift), INF))


@triton.jit
def store_bracket(
    bracket: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    units_above: tl.tensor,
    units_within: tl.tensor,
    count_above: tl.tensor,
    count_within: tl.tensor,
) -> None:
    """Store a bracket, int64 `[6]`."""
    tl.store(bracket, low.to(tl.int64))
    tl.store(bracket + 1, high.to(tl.int64))
    tl.store(bracket + 2, units_above)
    tl.store(bracket + 3, units_within)
    tl.store(bracket + 4, count_above)
    tl.store(bracket + 5, count_within)


@triton.jit(do_not_specialize=["splits", "stride", "num_sampled"])
def start_search(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    kept: tl.tensor,
    brackets: tl.tensor,
    edge_keys: tl.tensor,
    edges: tl.tensor,
    sums: tl.tensor,
    open_flags: tl.tensor,
    counters: tl.tensor,
    sample: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    num_sampled: tl.tensor,
    splits: tl.tensor,
    capacity: tl.constexpr,
    size: tl.constexpr,
    shift: tl.constexpr,
) -> None:
    """Sort a sample of each row, and guess the first edges from it.

    A row of which min_p keeps few tokens is not searched.
    """
    row = tl.program_id(0).to(tl.int64)
    highest_key = (row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    tl.store(sums + row * 8 + tl.arange(0, 8), tl.zeros((8,), tl.int64))
    tl.store(counters + row, 0)
    tl.store(open_flags + row, 0)
    if not is_sound(highest_key):
        return
    highest = score_of(highest_key, 0)
    scale = weight_scale(parameters, row)
    top_k = parameter(parameters, TOP_K, row).to(tl.float32)
    top_p = tl.minimum(parameter(parameters, TOP_P, row).to(tl.float32), 1.0)
    floor = floor_key(parameters, highest, row, shift)
    high = (highest_key >> shift) + 1
    columns = tl.arange(0, MAX_SPLITS)
    kept += row * 2 * MAX_SPLITS + columns
    total = tl.sum(tl.load(kept, mask=columns < splits, other=0), axis=0)
    num_kept = tl.sum(tl.load(kept + MAX_SPLITS, mask=columns < splits, other=0), axis=0)
    zero = tl.zeros((), tl.int64)
    brackets += row * 24
    # The bracket of a filter that drops no token is empty.
    k_high = tl.where(top_k < num_kept, high, floor)
    p_high = tl.where(top_p < 1.0, high, floor)
    store_bracket(brackets, floor, k_high, zero, total, zero, num_kept)
    store_bracket(brackets + 8, floor, p_high, zero, total, zero, num_kept)
    tl.store(brackets + 16, total)
    tl.store(brackets + 17, num_kept)
    if num_kept <= capacity:
        return
    scores += tl.load(indices + row) * row_stride
    places = tl.arange(0, size)
    ids = (places // RUN) * stride + places % RUN
    loaded = tl.load(scores + ids, mask=ids < vocab_size, other=-INF)
    keys = tl.sort(keys_of(loaded, shift), descending=True)
    weights = tl.exp2((score_of(keys, shift) - highest) * scale)
    weight_sums = tl.cumsum(weights, axis=0)
    squares = tl.cumsum(weights * weights, axis=0)
    counts = (places + 1).to(tl.float32)
    sample += row * 3 * size + places
    tl.store(sample, keys.to(tl.float32, bitcast=True))
    tl.store(sample + size, weight_sums)
    tl.store(sample + 2 * size, squares)
    is_kept = keys >= floor
    num_seen = tl.maximum(tl.sum(is_kept.to(tl.int32), axis=0), 1).to(tl.float32)
    k_share = tl.minimum(top_k * num_sampled / vocab_size / num_seen, 1.0)
    margin: tl.constexpr = size // 128 + 1
    k_lower, k_upper = edges_within(
        keys, counts, counts, floor, high, k_share, k_share, margin
    )  # fmt: skip
    is_wide = high > floor + 1
    k_open = is_wide & (top_k < num_kept)
    if k_open:
        # Shares of the sample stand for shares of the row.
        mass = tl.max(tl.where(is_kept, weight_sums, 0.0), axis=0)
        k_mass = tl.max(tl.where(is_kept & (counts <= k_share * num_seen + 1.0), weight_sums, 0.0))
        p_share = top_p * k_mass / tl.maximum(mass, 1e-30)
        p_lower, p_upper = edges_within(
            keys, weight_sums, squares, floor, high, p_share, p_share, margin
        )  # fmt: skip
    else:
        expected = total.to(tl.float32) / UNIT * num_sampled / vocab_size
        p_lower, p_upper = _edges_around(
            keys, weight_sums, squares, floor, high, top_p * expected, expected, margin
        )  # fmt: skip
    p_open = is_wide & (top_p < 1.0)
    at = row * 4
    store_edges(edge_keys, edges, at, k_open, k_lower, k_upper, shift)
    store_edges(edge_keys, edges, at + 2, p_open, p_lower, p_upper, shift)
    tl.store(open_flags + row, k_open.to(tl.int32) + 2 * p_open.to(tl.int32))
