"""Finds the drawn token of a filtered row, once its brackets are narrow.

The tokens of brackets that hold several keys are copied out, and one program a row finds the
crossings among them. Where a crossing is one key, counts say which of the equal tokens is meant,
however many they are. A row whose brackets are still wide is searched as a whole, to the same
result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton.choice.scores import (
    EMPTY,
    INF,
    MAX_SPLITS,
    NO_TOKEN,
    SCALE,
    TOP_K,
    TOP_P,
    UNIFORM,
    is_sound,
    keys_of,
    load_scores,
    parameter,
    row_maximum,
    score_of,
    units_of,
)

__all__ = ["collect_candidates", "draw_filtered"]


@triton.jit
def _ends(
    brackets: tl.tensor, shift: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the scores at both ends of a bracket, the lower one +inf if it holds one key."""
    low = tl.load(brackets).to(tl.int32)
    high = tl.load(brackets + 1).to(tl.int32)
    lowest = tl.where(high > low + 1, score_of(low, shift), INF)
    return lowest, score_of(high, shift), low, high


@triton.jit(do_not_specialize=["splits"])
def collect_candidates(
    scores: tl.tensor,
    indices: tl.tensor,
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
    """Write key and id of the tokens in brackets, int64 `[num_rows, capacity]`, in any order.

    `equals`, int32 `[num_rows, 32]`, counts the tokens of the drawn key in each part of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    highest_key = (row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not is_sound(highest_key):
        return
    if tl.load(open_flags + row) != 0:
        return
    tile: tl.constexpr = lanes * width
    brackets += row * 32
    k_low, k_high, _, _ = _ends(brackets, shift)
    p_low, p_high, _, _ = _ends(brackets + 8, shift)
    u_low, u_high, u_key, _ = _ends(brackets + 16, shift)
    u_score = score_of(u_key, shift)
    scores += tl.load(indices + row) * row_stride
    first = split * split_size
    end = tl.minimum(first + split_size, vocab_size)
    num_equal = tl.zeros((lanes,), tl.int32)
    counts = tl.zeros((lanes,), tl.int32)
    for start in range(first, end, tile):
        ids = start + tl.arange(0, tile)
        loaded = tl.load(scores + ids, mask=ids < vocab_size, other=-INF)
        values = tl.reshape(loaded, (lanes, width)).to(tl.float32)
        is_candidate = (values >= k_low) & (values < k_high)
        is_candidate |= (values >= p_low) & (values < p_high)
        is_candidate |= (values >= u_low) & (values < u_high)
        counts += tl.sum(is_candidate.to(tl.int32), axis=1)
        num_equal += tl.sum((values == u_score).to(tl.int32), axis=1)
    tl.store(equals + row * MAX_SPLITS + split, tl.sum(num_equal, axis=0))
    num_candidates = tl.sum(counts, axis=0)
    if num_candidates > 0:
        place = tl.atomic_add(counters + row, num_candidates, sem="relaxed")
        offsets = place + tl.cumsum(counts, axis=0) - counts
        candidates += row * capacity
        for start in range(first, end, tile):
            ids = start + tl.arange(0, tile)
            loaded = tl.load(scores + ids, mask=ids < vocab_size, other=-INF)
            values = tl.reshape(loaded, (lanes, width)).to(tl.float32)
            is_candidate = (values >= k_low) & (values < k_high)
            is_candidate |= (values >= p_low) & (values < p_high)
            is_candidate |= (values >= u_low) & (values < u_high)
            ones = is_candidate.to(tl.int32)
            places = offsets[:, None] + tl.cumsum(ones, axis=1) - ones
            packed = keys_of(values, shift).to(tl.int64) << 32
            packed |= tl.reshape(ids, (lanes, width)).to(tl.int64)
            tl.store(candidates + places, packed, mask=is_candidate & (places < capacity))
            offsets += tl.sum(ones, axis=1)


@triton.jit
def _load_either(
    scores: tl.tensor,
    candidates: tl.tensor,
    is_few: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    tile: tl.constexpr,
    shift: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return keys and ids of a tile of the candidates, or of the row if they are too many."""
    places = start + tl.arange(0, tile)
    # One of both is empty.
    packed = tl.load(candidates + places, mask=places < size * is_few, other=EMPTY)
    loaded = tl.load(scores + places, mask=places < size * (1 - is_few), other=-INF)
    keys = tl.maximum((packed >> 32).to(tl.int32), keys_of(loaded, shift))
    return keys, tl.where(packed == EMPTY, places, (packed & 0xFFFFFFFF).to(tl.int32))


@triton.jit
def _crossing(
    scores: tl.tensor,
    candidates: tl.tensor,
    is_few: tl.tensor,
    size: tl.tensor,
    bracket: tl.tensor,
    limit: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    by_count: tl.constexpr,
    tile: tl.constexpr,
    shift: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the key at which the sum reaches the limit, and weight and count above that key."""
    first = tl.load(bracket)
    last = tl.load(bracket + 1)
    weight_above = tl.load(bracket + 2)
    count_above = tl.load(bracket + 4)
    # The crossing is at `first` or above it, and below `last`.
    while last - first > 1:
        middle = (first + last) >> 1
        units = tl.zeros((tile,), tl.int64)
        counts = tl.zeros((tile,), tl.int32)
        for start in range(0, size, tile):
            keys, _ = _load_either(scores, candidates, is_few, start, size, tile, shift)
            is_within = (keys >= middle) & (keys < last)
            weights = units_of(score_of(keys, shift), highest, scale)
            units += tl.where(is_within, weights, 0)
            counts += is_within.to(tl.int32)
        weight = weight_above + tl.sum(units, axis=0)
        count = count_above + tl.sum(counts, axis=0)
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
    candidates: tl.tensor,
    is_few: tl.tensor,
    size: tl.tensor,
    key: tl.tensor,
    place: tl.tensor,
    vocab_size: tl.tensor,
    tile: tl.constexpr,
    shift: tl.constexpr,
) -> tl.tensor:
    """Return the id of the token of this key that has `place` lower ones."""
    low = tl.zeros((), tl.int64)
    high = low + vocab_size
    while high > low + 1:
        middle = (low + high) >> 1
        counts = tl.zeros((tile,), tl.int32)
        for start in range(0, size, tile):
            keys, ids = _load_either(scores, candidates, is_few, start, size, tile, shift)
            counts += ((keys == key) & (ids < middle)).to(tl.int32)
        if tl.sum(counts, axis=0) > place:
            high = middle
        else:
            low = middle
    return low


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
    """Return the same from the counts of the key in each part of the row."""
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


@triton.jit(do_not_specialize=["splits"])
def draw_filtered(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    brackets: tl.tensor,
    open_flags: tl.tensor,
    counters: tl.tensor,
    equals: tl.tensor,
    candidates: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    capacity: tl.constexpr,
    tile: tl.constexpr,
    long_tile: tl.constexpr,
    shift: tl.constexpr,
) -> None:
    """Write the token of each row, int64 `[num_rows]`."""
    row = tl.program_id(0).to(tl.int64)
    highest_key = (row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not is_sound(highest_key):
        tl.store(out + row, NO_TOKEN)
        return
    highest = score_of(highest_key, 0)
    scale = parameter(parameters, SCALE, row).to(tl.float32)
    top_k = parameter(parameters, TOP_K, row).to(tl.int64)
    top_p = parameter(parameters, TOP_P, row)
    uniform = parameter(parameters, UNIFORM, row)
    scores += tl.load(indices + row) * row_stride
    candidates += row * capacity
    brackets += row * 32
    is_few = (tl.load(open_flags + row) == 0).to(tl.int32)
    size = tl.where(is_few != 0, tl.load(counters + row), vocab_size).to(tl.int32)
    u_width = tl.load(brackets + 17) - tl.load(brackets + 16)
    total = tl.load(brackets + 24)
    if top_k < tl.load(brackets + 25):
        key, above, count = _crossing(
            scores, candidates, is_few, size, brackets, top_k, highest, scale, True, tile, shift
        )  # fmt: skip
        total = above + (top_k - count) * units_of(score_of(key, shift), highest, scale)
    kept = total
    if top_p < 1.0:
        limit = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        limit = tl.minimum(limit, total)
        key, above, count = _crossing(
            scores, candidates, is_few, size, brackets + 8, limit, highest, scale, False, tile,
            shift,
        )  # fmt: skip
        unit = tl.maximum(units_of(score_of(key, shift), highest, scale), 1)
        kept = above + ((limit - above + unit - 1) // unit) * unit
    drawn = tl.minimum((uniform * kept.to(tl.float64)).to(tl.int64), kept - 1)
    key, above, count = _crossing(
        scores, candidates, is_few, size, brackets + 16, drawn + 1, highest, scale, False, tile,
        shift,
    )  # fmt: skip
    unit = tl.maximum(units_of(score_of(key, shift), highest, scale), 1)
    place = (drawn - above) // unit
    if (is_few != 0) & (u_width == 1):
        token_id = _id_by_counts(
            scores, equals + row * MAX_SPLITS, key, place, vocab_size, split_size, splits,
            long_tile, shift,
        )  # fmt: skip
    else:
        token_id = _id_among_equals(
            scores, candidates, is_few, size, key, place, vocab_size, tile, shift
        )  # fmt: skip
    tl.store(out + row, token_id)
