"""Finds the cut of a filtered row, once its brackets are narrow.

The cut of a row is the least score that its filters keep, and the last id that they keep of the
tokens with that score. The tokens of brackets that hold several keys are copied out, and one
program a row finds the crossings among them. Where a crossing is a single key, counts select the
token among any number of equal tokens. A row whose brackets are still wide is searched as a whole,
to the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.choice.scores import (
    INF,
    MAX_SPLITS,
    TOP_K,
    TOP_P,
    floor_key,
    is_sound,
    keys_of,
    load_lanes,
    load_scores,
    parameter,
    row_maximum,
    score_of,
    units_of,
    weight_scale,
)

__all__ = ["collect_candidates", "find_cuts"]


@triton.jit
def _ends(
    brackets: tl.tensor, shift: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the scores at both ends of a bracket, the lower one +inf if it holds one key."""
    low = tl.load(brackets).to(tl.int32)
    high = tl.load(brackets + 1).to(tl.int32)
    lowest = tl.where(high > low + 1, score_of(low, shift), INF)
    return lowest, score_of(high, shift), low, high


@triton.jit
def _is_within(
    values: tl.tensor,
    has_k: tl.tensor,
    k_low: tl.tensor,
    k_high: tl.tensor,
    p_low: tl.tensor,
    p_high: tl.tensor,
) -> tl.tensor:
    """Return 1 for scores in one of the brackets that hold several keys, otherwise 0, int32."""
    is_candidate = (values >= p_low) & (values < p_high)
    if has_k:
        is_candidate |= (values >= k_low) & (values < k_high)
    return is_candidate.to(tl.int32)


@triton.jit
def _write_ids(
    candidates: tl.tensor,
    start: tl.tensor,
    ones: tl.tensor,
    offsets: tl.tensor,
    capacity: tl.constexpr,
    lanes: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Write the ids of candidates from each lane's offset on; return the offsets after them."""
    ids = tl.reshape(start + tl.arange(0, lanes * width), (lanes, width))
    places = offsets[:, None] + tl.cumsum(ones, axis=1) - ones
    tl.store(candidates + places, ids, mask=(ones != 0) & (places < capacity))
    return offsets + tl.sum(ones, axis=1)


@triton.jit(do_not_specialize=["splits"])
def collect_candidates(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    brackets: tl.tensor,
    open_flags: tl.tensor,
    counters: tl.tensor,
    equals: tl.tensor,
    candidates: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    capacity: tl.constexpr,
    lanes: tl.constexpr,
    width: tl.constexpr,
    shift: tl.constexpr,
) -> None:
    """Write the ids of the tokens in brackets, int32 `[num_rows, capacity]`, in any order.

    `equals`, int32 `[num_rows, 32]`, counts the tokens of the cut's key in each part of a row, if
    its bracket holds a single key.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    highest_key = (row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not is_sound(highest_key):
        return
    if tl.load(open_flags + row) != 0:
        return
    tile: tl.constexpr = lanes * width
    brackets += row * 24
    k_low, k_high, k_key, _ = _ends(brackets, shift)
    p_low, p_high, p_key, _ = _ends(brackets + 8, shift)
    is_p = parameter(parameters, TOP_P, row) < 1.0
    cut = score_of(tl.where(is_p, p_key, k_key), shift)
    has_k = k_low < INF
    scores += tl.load(indices + row) * row_stride
    candidates += row * capacity
    first = split * split_size
    end = tl.minimum(first + split_size, vocab_size)
    num_equal = tl.zeros((lanes,), tl.int32)
    # Reserve places for two tiles at a time, which halves the number of atomic additions.
    for start in range(first, end, 2 * tile):
        values = load_lanes(scores, start, end, lanes, width)
        others = load_lanes(scores, start + tile, end, lanes, width)
        num_equal += tl.sum((values == cut).to(tl.int32), axis=1)
        num_equal += tl.sum((others == cut).to(tl.int32), axis=1)
        ones = _is_within(values, has_k, k_low, k_high, p_low, p_high)
        other_ones = _is_within(others, has_k, k_low, k_high, p_low, p_high)
        counts = tl.sum(ones, axis=1) + tl.sum(other_ones, axis=1)
        num_found = tl.sum(counts, axis=0)
        if num_found > 0:
            place = tl.atomic_add(counters + row, num_found, sem="relaxed")
            offsets = place + tl.cumsum(counts, axis=0) - counts
            offsets = _write_ids(candidates, start, ones, offsets, capacity, lanes, width)
            _write_ids(candidates, start + tile, other_ones, offsets, capacity, lanes, width)
    tl.store(equals + row * MAX_SPLITS + split, tl.sum(num_equal, axis=0))


@triton.jit
def _crossing(
    scores: tl.tensor,
    keys: tl.tensor,
    units: tl.tensor,
    bracket: tl.tensor,
    limit: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    vocab_size: tl.tensor,
    by_count: tl.constexpr,
    is_few: tl.constexpr,
    tile: tl.constexpr,
    shift: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the key at which the sum reaches the limit, and weight and count above that key.

    It lies among the candidates' keys, with weights `units`, if these are few; otherwise in the
    row. The count is right only `by_count`.
    """
    first = tl.load(bracket)
    last = tl.load(bracket + 1)
    weight_above = tl.load(bracket + 2)
    count_above = tl.load(bracket + 4)
    # The crossing is at `first` or above it, and below `last`.
    while last - first > 1:
        middle = (first + last) >> 1
        low_key = middle.to(tl.int32)
        high_key = last.to(tl.int32)
        count = count_above
        if is_few:
            is_within = (keys >= low_key) & (keys < high_key)
            weight = weight_above + tl.sum(tl.where(is_within, units, 0), axis=0)
            if by_count:
                count += tl.sum(is_within.to(tl.int32), axis=0)
        else:
            row_units = tl.zeros((tile,), tl.int64)
            counts = tl.zeros((tile,), tl.int32)
            for start in range(0, vocab_size, tile):
                values, _ = load_scores(scores, start, vocab_size, tile)
                row_keys = keys_of(values, shift)
                is_within = (row_keys >= low_key) & (row_keys < high_key)
                row_units += tl.where(is_within, units_of(values, highest, scale), 0)
                counts += is_within.to(tl.int32)
            weight = weight_above + tl.sum(row_units, axis=0)
            count += tl.sum(counts, axis=0)
        reached = count if by_count else weight
        if reached >= limit:
            first = middle
        else:
            last = middle
            weight_above = weight
            count_above = count
    return first.to(tl.int32), weight_above, count_above


@triton.jit
def _id_among_equals(
    scores: tl.tensor,
    keys: tl.tensor,
    ids: tl.tensor,
    key: tl.tensor,
    place: tl.tensor,
    vocab_size: tl.tensor,
    end: tl.tensor,
    is_few: tl.constexpr,
    tile: tl.constexpr,
    shift: tl.constexpr,
) -> tl.tensor:
    """Return the id, below `end`, of the key's token with `place` lower tokens."""
    low = tl.zeros((), tl.int32)
    high = low + end
    while high > low + 1:
        middle = (low + high) >> 1
        if is_few:
            count = tl.sum(((keys == key) & (ids < middle)).to(tl.int32), axis=0)
        else:
            counts = tl.zeros((tile,), tl.int32)
            for start in range(0, middle, tile):
                values, row_ids = load_scores(scores, start, vocab_size, tile)
                counts += ((keys_of(values, shift) == key) & (row_ids < middle)).to(tl.int32)
            count = tl.sum(counts, axis=0)
        if count > place:
            high = middle
        else:
            low = middle
    return low.to(tl.int64)


@triton.jit
def _id_by_counts(
    scores: tl.tensor,
    equals: tl.tensor,
    key: tl.tensor,
    place: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    tile: tl.constexpr,
    shift: tl.constexpr,
) -> tl.tensor:
    """Compute `_id_among_equals` from the counts of the key in each part of the row."""
    columns = tl.arange(0, MAX_SPLITS)
    ends = tl.cumsum(tl.load(equals + columns, mask=columns < splits, other=0), axis=0)
    split = tl.sum((ends <= place).to(tl.int32), axis=0)
    before = tl.max(tl.where(ends <= place, ends, 0), axis=0).to(tl.int64)
    token_id = tl.full((), -1, tl.int64)
    start = split * split_size
    while token_id < 0:
        values, _ = load_scores(scores, start, vocab_size, tile)
        matches = (keys_of(values, shift) == key).to(tl.int32)
        tile_ends = before + tl.cumsum(matches, axis=0)
        offset = tl.sum((tile_ends <= place).to(tl.int32), axis=0)
        if offset < tile:
            token_id = (start + offset).to(tl.int64)
        # A bound that no sound row reaches, so that the loop ends.
        if start >= vocab_size:
            token_id = tl.zeros((), tl.int64)
        before = tl.max(tile_ends, axis=0)
        start += tile
    return token_id


@triton.jit
def _cut(
    scores: tl.tensor,
    keys: tl.tensor,
    units: tl.tensor,
    ids: tl.tensor,
    parameters: tl.tensor,
    brackets: tl.tensor,
    equals: tl.tensor,
    row: tl.tensor,
    highest: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    is_few: tl.constexpr,
    tile: tl.constexpr,
    shift: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the least key that is kept, and the last id of its kept tokens, int64.

    `keys`, `units` and `ids` belong to few candidates.
    """
    scale = weight_scale(parameters, row)
    top_k = parameter(parameters, TOP_K, row).to(tl.int64)
    top_p = parameter(parameters, TOP_P, row)
    total = tl.load(brackets + 16)
    key = floor_key(parameters, highest, row, shift)
    num_equal = tl.zeros((), tl.int64)
    width = tl.zeros((), tl.int64)
    if top_k < tl.load(brackets + 17):
        key, above, count = _crossing(
            scores, keys, units, brackets, top_k, highest, scale, vocab_size, True, is_few, tile,
            shift,
        )  # fmt: skip
        num_equal = top_k - count
        total = above + num_equal * units_of(score_of(key, shift), highest, scale)
        width = tl.load(brackets + 1) - tl.load(brackets)
    if top_p < 1.0:
        limit = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        limit = tl.minimum(limit, total)
        key, above, count = _crossing(
            scores, keys, units, brackets + 8, limit, highest, scale, vocab_size, False, is_few,
            tile, shift,
        )  # fmt: skip
        unit = tl.maximum(units_of(score_of(key, shift), highest, scale), 1)
        num_equal = (limit - above + unit - 1) // unit
        width = tl.load(brackets + 9) - tl.load(brackets + 8)
    place = num_equal - 1
    end = splits * split_size
    last_id = tl.full((), 0x7FFFFFFF, tl.int64)
    if num_equal > 0:
        if is_few:
            if width == 1:
                last_id = _id_by_counts(
                    scores, equals, key, place, vocab_size, split_size, splits, tile, shift
                )
            else:
                last_id = _id_among_equals(
                    scores, keys, ids, key, place, vocab_size, end, True, tile, shift
                )
        else:
            last_id = _id_among_equals(
                scores, keys, ids, key, place, vocab_size, end, False, tile, shift
            )
    return key, last_id


@triton.jit(do_not_specialize=["splits"])
def find_cuts(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    brackets: tl.tensor,
    open_flags: tl.tensor,
    counters: tl.tensor,
    equals: tl.tensor,
    candidates: tl.tensor,
    cut_scores: tl.tensor,
    cut_ids: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    capacity: tl.constexpr,
    tile: tl.constexpr,
    shift: tl.constexpr,
) -> None:
    """Write the cut of each row, float32 and int64 `[num_rows]`; a broken row stays whole."""
    row = tl.program_id(0).to(tl.int64)
    highest_key = (row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not is_sound(highest_key):
        tl.store(cut_scores + row, -INF)
        tl.store(cut_ids + row, 0x7FFFFFFF)
        return
    highest = score_of(highest_key, 0)
    scores += tl.load(indices + row) * row_stride
    brackets += row * 24
    equals += row * MAX_SPLITS
    if tl.load(open_flags + row) == 0:
        # All of them are in registers during the search.
        places = tl.arange(0, capacity)
        is_candidate = places < tl.load(counters + row)
        ids = tl.load(candidates + row * capacity + places, mask=is_candidate, other=0)
        values = tl.load(scores + ids, mask=is_candidate, other=-INF).to(tl.float32)
        keys = keys_of(values, shift)
        units = units_of(values, highest, weight_scale(parameters, row))
        key, last_id = _cut(
            scores, keys, units, ids, parameters, brackets, equals, row, highest, vocab_size,
            split_size, splits, True, tile, shift,
        )  # fmt: skip
    else:
        key, last_id = _cut(
            scores, highest, highest, highest, parameters, brackets, equals, row, highest,
            vocab_size, split_size, splits, False, tile, shift,
        )  # fmt: skip
    tl.store(cut_scores + row, score_of(key, shift))
    tl.store(cut_ids + row, last_id)
