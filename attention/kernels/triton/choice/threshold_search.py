"""Narrows the brackets of keys in which the cuts of a row lie.

A filtered row is searched for up to two crossings: where the count reaches top_k, and where the
weight reaches top_p of the remaining weight. Each lies in a bracket of keys `[low, high)` with
exact weights and counts above both ends. A pass over the row sums weights and counts above two
edges of each bracket. The edges are guessed from a sorted sample of the row; a poor guess costs
another pass, never a wrong token.

Memory by row: `kept` int64 `[num_rows, 2, 32]` (units and count of all that min_p keeps, by parts
of the row), `brackets` int64 `[num_rows, 3, 8]` (low, high, units above, units within, count above,
count within; in the last one the sums of `kept`), `edge_keys` int32 and `edges` float32
`[num_rows, 4]` (two of each bracket), `sums` int64 `[num_rows, 8]` (units, then counts, above each
edge), `open_flags` int32 `[num_rows]` (a bit for each bracket to narrow; 0 once few tokens are
left), `counters` int32 `[num_rows]`, `sample` float32 `[num_rows, 3, size]` (keys as int32, running
sums of the weights and of their squares).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.choice.scores import (
    MAX_SPLITS,
    TOP_K,
    TOP_P,
    floor_key,
    is_sound,
    load_lanes,
    parameter,
    row_maximum,
    score_of,
    units_of,
    weight_scale,
)
from attention.kernels.triton.choice.threshold_sample import (
    ALL_UNITS,
    edges_within,
    store_bracket,
    store_edges,
)

__all__ = ["MAX_SPLIT_SIZE", "narrow_brackets", "sum_above", "sum_kept"]

MAX_SPLIT_SIZE = 65536
"""Maximum scores of a program, so that the units of a thread do not overflow into its count."""
_COUNT_SHIFT = tl.constexpr(50)
"""Each of 128 threads has at most 512 scores, of at most 2**40 units each."""
_ONE = tl.constexpr(1 << 50)
_UNITS = tl.constexpr((1 << 50) - 1)


@triton.jit
def _counted(units: tl.tensor) -> tl.tensor:
    """Return units plus a count of 1, in bits above the largest sum of units of a thread."""
    return units + _ONE


@triton.jit
def _above(values: tl.tensor, counted: tl.tensor, edge: tl.tensor) -> tl.tensor:
    """Return the sum of `counted`, as of `_counted`, over scores from the edge up, `[lanes]`."""
    return tl.sum(tl.where(values >= edge, counted, 0), axis=1)


@triton.jit
def _units_and_count(sums: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the units and the count of the sums of all lanes, int64."""
    units = tl.sum(sums & _UNITS, axis=0)
    return units, tl.sum(sums >> _COUNT_SHIFT, axis=0)


@triton.jit(do_not_specialize=["splits"])
def sum_kept(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    kept: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    lanes: tl.constexpr,
    width: tl.constexpr,
    shift: tl.constexpr,
) -> None:
    """Write to `kept` the units and the count of the tokens of each part that min_p keeps."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    highest_key = (row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not is_sound(highest_key):
        return
    tile: tl.constexpr = lanes * width
    highest = score_of(highest_key, 0)
    scale = weight_scale(parameters, row)
    floor = score_of(floor_key(parameters, highest, row, shift), shift)
    scores += tl.load(indices + row) * row_stride
    sums = tl.zeros((lanes,), tl.int64)
    first = split * split_size
    for start in range(first, tl.minimum(first + split_size, vocab_size), tile):
        values = load_lanes(scores, start, vocab_size, lanes, width)
        sums += _above(values, _counted(units_of(values, highest, scale)), floor)
    kept += row * 2 * MAX_SPLITS + split
    units, count = _units_and_count(sums)
    tl.store(kept, units)
    tl.store(kept + MAX_SPLITS, count)


@triton.jit
def _add(sums: tl.tensor, found: tl.tensor) -> None:
    units, count = _units_and_count(found)
    tl.atomic_add(sums, units, sem="relaxed")
    tl.atomic_add(sums + 4, count, sem="relaxed")


@triton.jit(do_not_specialize=["splits"])
def sum_above(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    edges: tl.tensor,
    sums: tl.tensor,
    open_flags: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    lanes: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Add to `sums` units and counts of the tokens of each part above the edges.

    A thread loads `width` scores at a time and adds them up in its own registers.
    """
    row = tl.program_id(0).to(tl.int64)
    flags = tl.load(open_flags + row)
    if flags == 0:
        return
    tile: tl.constexpr = lanes * width
    split = tl.program_id(1)
    highest = score_of((row_maximum(maxima, row, splits) >> 32).to(tl.int32), 0)
    scale = weight_scale(parameters, row)
    scores += tl.load(indices + row) * row_stride
    edges += row * 4
    k_lower, k_upper = tl.load(edges), tl.load(edges + 1)
    p_lower, p_upper = tl.load(edges + 2), tl.load(edges + 3)
    above_0 = tl.zeros((lanes,), tl.int64)
    above_1 = tl.zeros((lanes,), tl.int64)
    above_2 = tl.zeros((lanes,), tl.int64)
    above_3 = tl.zeros((lanes,), tl.int64)
    first = split * split_size
    for start in range(first, tl.minimum(first + split_size, vocab_size), tile):
        values = load_lanes(scores, start, vocab_size, lanes, width)
        counted = _counted(units_of(values, highest, scale))
        if (flags & 1) != 0:
            above_0 += _above(values, counted, k_lower)
            above_1 += _above(values, counted, k_upper)
        if (flags & 2) != 0:
            above_2 += _above(values, counted, p_lower)
            above_3 += _above(values, counted, p_upper)
    sums += row * 8
    if (flags & 1) != 0:
        _add(sums, above_0)
        _add(sums + 1, above_1)
    if (flags & 2) != 0:
        _add(sums + 2, above_2)
        _add(sums + 3, above_3)


@triton.jit
def _narrowed(
    bracket: tl.tensor,
    edge_keys: tl.tensor,
    units: tl.tensor,
    counts: tl.tensor,
    measures: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the bracket of the crossing that lies where the measure reaches `least` to `most`."""
    low = tl.load(bracket).to(tl.int32)
    high = tl.load(bracket + 1).to(tl.int32)
    units_above = tl.load(bracket + 2)
    units_within = tl.load(bracket + 3)
    count_above = tl.load(bracket + 4)
    count_within = tl.load(bracket + 5)
    is_before = measures < least
    has_reached = measures >= most
    high = tl.minimum(high, tl.min(tl.where(is_before, edge_keys, high), axis=0))
    units_above = tl.maximum(units_above, tl.max(tl.where(is_before, units, 0), axis=0))
    count_above = tl.maximum(count_above, tl.max(tl.where(is_before, counts, 0), axis=0))
    low = tl.maximum(low, tl.max(tl.where(has_reached, edge_keys, low), axis=0))
    units_within = tl.minimum(
        units_within, tl.min(tl.where(has_reached, units, ALL_UNITS), axis=0)
    )  # fmt: skip
    count_within = tl.minimum(
        count_within, tl.min(tl.where(has_reached, counts, ALL_UNITS), axis=0)
    )  # fmt: skip
    return low, high, units_above, units_within, count_above, count_within


@triton.jit
def _share(limit: tl.tensor, above: tl.tensor, within: tl.tensor) -> tl.tensor:
    return (limit - above).to(tl.float32) / tl.maximum(within - above, 1).to(tl.float32)


@triton.jit(do_not_specialize=["splits"])
def narrow_brackets(
    parameters: tl.tensor,
    maxima: tl.tensor,
    brackets: tl.tensor,
    edge_keys: tl.tensor,
    edges: tl.tensor,
    sums: tl.tensor,
    open_flags: tl.tensor,
    sample: tl.tensor,
    splits: tl.tensor,
    capacity: tl.constexpr,
    size: tl.constexpr,
    shift: tl.constexpr,
) -> None:
    """Narrow the brackets of each row by the sums of a pass, and guess the next edges."""
    row = tl.program_id(0).to(tl.int64)
    flags = tl.load(open_flags + row)
    if flags == 0:
        return
    highest = score_of((row_maximum(maxima, row, splits) >> 32).to(tl.int32), 0)
    scale = weight_scale(parameters, row)
    top_k = parameter(parameters, TOP_K, row).to(tl.int64)
    top_p = parameter(parameters, TOP_P, row)
    brackets += row * 24
    at = row * 4
    slots = tl.arange(0, 4)
    tried = tl.load(edge_keys + at + slots)
    units = tl.load(sums + row * 8 + slots)
    counts = tl.load(sums + row * 8 + 4 + slots)
    total = tl.load(brackets + 16)
    num_kept = tl.load(brackets + 17)
    k_low, k_high, k_above, k_within, k_count, k_limit = _narrowed(
        brackets, tried, units, counts, counts, top_k, top_k
    )  # fmt: skip
    least = k_above
    most = k_within
    if top_k >= num_kept:
        k_high = k_low
        least = total
        most = total
    elif k_high == k_low + 1:
        least = k_above + (top_k - k_count) * units_of(score_of(k_low, shift), highest, scale)
        most = least
    p_least = tl.ceil(top_p * least.to(tl.float64)).to(tl.int64)
    p_least = tl.minimum(tl.maximum(p_least, 1), tl.maximum(least, 1))
    p_most = tl.ceil(top_p * most.to(tl.float64)).to(tl.int64)
    p_most = tl.minimum(tl.maximum(p_most, 1), most)
    p_low, p_high, p_above, p_within, p_count, p_limit = _narrowed(
        brackets + 8, tried, units, counts, units, p_least, p_most
    )  # fmt: skip
    if top_p >= 1.0:
        p_high = p_low
    store_bracket(brackets, k_low, k_high, k_above, k_within, k_count, k_limit)
    store_bracket(brackets + 8, p_low, p_high, p_above, p_within, p_count, p_limit)
    k_open = k_high > k_low + 1
    p_open = p_high > p_low + 1
    num_open = tl.where(k_open, k_limit - k_count, 0) + tl.where(p_open, p_limit - p_count, 0)
    if num_open <= capacity:
        tl.store(open_flags + row, 0)
        return
    tl.store(open_flags + row, k_open.to(tl.int32) + 2 * p_open.to(tl.int32))
    tl.store(sums + row * 8 + tl.arange(0, 8), tl.zeros((8,), tl.int64))
    margin: tl.constexpr = size // 128 + 1
    places = tl.arange(0, size)
    sample += row * 3 * size + places
    keys = tl.load(sample).to(tl.int32, bitcast=True)
    weight_sums = tl.load(sample + size)
    squares = tl.load(sample + 2 * size)
    ones = (places + 1).to(tl.float32)
    share = _share(top_k, k_count, k_limit)
    lower, upper = edges_within(keys, ones, ones, k_low, k_high, share, share, margin)
    store_edges(edge_keys, edges, at, k_open, lower, upper, shift)
    lower, upper = edges_within(
        keys, weight_sums, squares, p_low, p_high, _share(p_least, p_above, p_within),
        _share(p_most, p_above, p_within), margin,
    )  # fmt: skip
    store_edges(edge_keys, edges, at + 2, p_open, lower, upper, shift)
