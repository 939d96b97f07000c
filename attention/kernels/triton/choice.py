"""Draws tokens from rows of scores without sorting them.

Owns the kernels and their launches; what a choice is, `workers.sampling.choice` defines. Weights
are integers (units of `2 ** -40` of the likeliest token's), so that their sums are exact and depend
neither on the order of summation nor on how a row is divided among programs.

A filtered row is searched for up to three crossings at once: where the count reaches top_k, where
the weight reaches top_p of what is left, and where it passes the drawn share of that. Each is known
to lie in a bracket of keys, integers that sort like the scores. A pass over the row sums counts and
weights above 16 keys of each bracket, in float32 and with a margin for its rounding, which narrows
all brackets; it is skipped once they hold few tokens. These are then copied out, with exact sums of
what lies above, and one program a row finds the crossings among them. If they are still too many,
that program searches the whole row, to the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["ChoiceScratch", "choose_filtered", "choose_greedy", "choose_unfiltered"]

_CHUNK = 4096
"""Scores of a row are divided among programs in whole chunks."""
_LEVELS = 3
_PROGRAMS = 2048
"""About as many programs as are launched for a pass over the rows."""

NO_TOKEN = tl.constexpr(-1)
LARGEST_KEY = tl.constexpr(0x7F800000)
"""The key of +inf; NaN has a larger one."""
SMALLEST_KEY = tl.constexpr(-0x7F800001)
"""The key of -inf."""
UNIT = tl.constexpr(1099511627776.0)
MARGIN = tl.constexpr(4e-6)
INF = tl.constexpr(float("inf"))
EMPTY = tl.constexpr(-(1 << 63))
MAX_SPLITS = tl.constexpr(32)

# Rows of the parameters, and of the exact sums.
SCALE = tl.constexpr(0)
TEMPERATURE = tl.constexpr(1)
TOP_K = tl.constexpr(2)
TOP_P = tl.constexpr(3)
FLOOR = tl.constexpr(4)
UNIFORM = tl.constexpr(5)
NUM_PARAMETERS = 6
NUM_SUMS = tl.constexpr(8)


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceScratch:
    """Memory of the kernels for some rows; nothing in it outlives a call."""

    maxima: torch.Tensor
    """int64 `[num_rows, splits]`"""
    chunk_sums: torch.Tensor
    """int64 `[num_rows, splits]`"""
    keys: torch.Tensor
    """int32 `[levels + 1, num_rows, 3, 2]`: ends of the brackets"""
    bounds: torch.Tensor
    """float32 `[levels + 1, num_rows, 3, 4]`: weight and count above both ends"""
    tables: torch.Tensor
    """float32 `[levels, num_rows, 3, 2, 16]`"""
    sums: torch.Tensor
    """int64 `[num_rows, 8]`"""
    candidates: torch.Tensor
    """int64 `[num_rows, candidates]`"""

    @classmethod
    def make(cls, num_rows: int, capacity: int, device: torch.device) -> ChoiceScratch:
        """Allocate for as many rows, each divided among as many programs."""

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            maxima=empty(num_rows, MAX_SPLITS.value),
            chunk_sums=empty(num_rows, MAX_SPLITS.value),
            keys=empty(_LEVELS + 1, num_rows, 3, 2, dtype=torch.int32),
            bounds=empty(_LEVELS + 1, num_rows, 3, 4, dtype=torch.float32),
            tables=empty(_LEVELS, num_rows, 3, 2, 16, dtype=torch.float32),
            sums=empty(num_rows, 8),
            candidates=empty(num_rows, capacity),
        )


@triton.jit
def _keys_of(scores: tl.tensor) -> tl.tensor:
    values = scores.to(tl.float32)
    # Both zeros are one score.
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, 0x7FFFFFFF, keys)


@triton.jit
def _score_of(keys: tl.tensor) -> tl.tensor:
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights_of(keys: tl.tensor, highest: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.exp2((_score_of(keys) - highest) * scale)


@triton.jit
def _units_of(keys: tl.tensor, highest: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return (_weights_of(keys, highest, scale) * UNIT).to(tl.int64)


@triton.jit
def _parameter(parameters: tl.tensor, which: tl.constexpr, row: tl.tensor) -> tl.tensor:
    return tl.load(parameters + which * tl.num_programs(0) + row)


@triton.jit
def _load_keys(
    scores: tl.tensor, start: tl.tensor, vocab_size: tl.tensor, tile: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return keys and ids of a tile of a row; behind the vocabulary the key is that of -inf."""
    ids = start + tl.arange(0, tile)
    loaded = tl.load(scores + ids, mask=ids < vocab_size, other=-INF)
    return _keys_of(loaded), ids


@triton.jit
def _row_maximum(maxima: tl.tensor, row: tl.tensor, splits: tl.tensor) -> tl.tensor:
    columns = tl.arange(0, MAX_SPLITS)
    found = tl.load(maxima + row * MAX_SPLITS + columns, mask=columns < splits, other=EMPTY)
    return tl.max(found, axis=0)


@triton.jit
def _is_sound(key: tl.tensor) -> tl.tensor:
    return (key < LARGEST_KEY) & (key > SMALLEST_KEY)


@triton.jit(do_not_specialize=["splits"])
def _find_maxima(
    scores: tl.tensor,
    indices: tl.tensor,
    maxima: tl.tensor,
    tables: tl.tensor,
    sums: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    levels: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    scores += tl.load(indices + row) * row_stride
    first = split * split_size
    best = tl.full((tile,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(first, tl.minimum(first + split_size, vocab_size), tile):
        keys, ids = _load_keys(scores, start, vocab_size, tile)
        # The lower id has the larger lower half.
        best = tl.maximum(best, (keys.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64))
    tl.store(maxima + row * MAX_SPLITS + split, tl.max(best, axis=0))
    if levels > 0:  # noqa: SIM102  # known when the kernel is compiled
        if split == 0:
            columns = tl.arange(0, 128)
            for level in tl.static_range(levels):
                table = tables + (level * tl.num_programs(0) + row) * 96
                tl.store(table + columns, tl.zeros((128,), tl.float32), mask=columns < 96)
            slots = tl.arange(0, NUM_SUMS)
            tl.store(sums + row * NUM_SUMS + slots, tl.zeros((NUM_SUMS,), tl.int64))


@triton.jit(do_not_specialize=["splits"])
def _take_maxima(maxima: tl.tensor, out: tl.tensor, splits: tl.tensor) -> None:
    row = tl.program_id(0).to(tl.int64)
    best = _row_maximum(maxima, row, splits)
    token_id = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    tl.store(out + row, tl.where(_is_sound(best >> 32), token_id, NO_TOKEN))


@triton.jit(do_not_specialize=["splits"])
def _sum_chunks(
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
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    key = (_row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not _is_sound(key):
        return
    highest = _score_of(key)
    scale = _parameter(parameters, SCALE, row).to(tl.float32)
    scores += tl.load(indices + row) * row_stride
    first = split * split_size
    units = tl.zeros((tile,), tl.int64)
    for start in range(first, tl.minimum(first + split_size, vocab_size), tile):
        keys, _ = _load_keys(scores, start, vocab_size, tile)
        units += _units_of(keys, highest, scale)
    tl.store(chunk_sums + row * MAX_SPLITS + split, tl.sum(units, axis=0))


@triton.jit(do_not_specialize=["splits"])
def _draw_unfiltered(
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
    row = tl.program_id(0).to(tl.int64)
    key = (_row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not _is_sound(key):
        tl.store(out + row, NO_TOKEN)
        return
    highest = _score_of(key)
    scale = _parameter(parameters, SCALE, row).to(tl.float32)
    scores += tl.load(indices + row) * row_stride
    columns = tl.arange(0, MAX_SPLITS)
    sums = tl.load(chunk_sums + row * MAX_SPLITS + columns, mask=columns < splits, other=0)
    total = tl.sum(sums, axis=0)
    drawn = (_parameter(parameters, UNIFORM, row) * total.to(tl.float64)).to(tl.int64)
    drawn = tl.minimum(drawn, total - 1)
    ends = tl.cumsum(sums, axis=0)
    split = tl.sum((ends <= drawn).to(tl.int32), axis=0)
    before = tl.max(tl.where(ends <= drawn, ends, 0), axis=0)
    token_id = tl.full((), -1, tl.int64)
    start = split * split_size
    while token_id < 0:
        keys, _ = _load_keys(scores, start, vocab_size, tile)
        tile_ends = before + tl.cumsum(_units_of(keys, highest, scale), axis=0)
        place = tl.sum((tile_ends <= drawn).to(tl.int32), axis=0)
        if place < tile:
            token_id = (start + place).to(tl.int64)
        before = tl.max(tile_ends, axis=0)
        start += tile
    tl.store(out + row, token_id)


@triton.jit
def _narrow(
    keys: tl.tensor,
    measures: tl.tensor,
    weights: tl.tensor,
    counts: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    weight_above: tl.tensor,
    count_above: tl.tensor,
    weight_within: tl.tensor,
    count_within: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the bracket of a crossing that lies where the measure reaches `least` to `most`."""
    is_before = measures < least
    has_crossed = measures >= most
    high = tl.minimum(high, tl.min(tl.where(is_before, keys, high), axis=0))
    weight_above = tl.maximum(weight_above, tl.max(tl.where(is_before, weights, 0.0), axis=0))
    count_above = tl.maximum(count_above, tl.max(tl.where(is_before, counts, 0.0), axis=0))
    low = tl.maximum(low, tl.max(tl.where(has_crossed, keys, low), axis=0))
    weight_within = tl.minimum(weight_within, tl.min(tl.where(has_crossed, weights, INF), axis=0))
    count_within = tl.minimum(count_within, tl.min(tl.where(has_crossed, counts, INF), axis=0))
    return low, high, weight_above, count_above, weight_within, count_within


@triton.jit
def _keys_between(
    low: tl.tensor,
    high: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    level: tl.constexpr,
) -> tl.tensor:
    """Return 16 ascending keys, the first of which is `low`."""
    steps = tl.arange(0, 16)
    if level > 0:
        width = high.to(tl.int64) - low.to(tl.int64)
        return (low.to(tl.int64) + (width * steps.to(tl.int64) >> 4)).to(tl.int32)
    # From the likeliest token down in steps of a factor e of the weight.
    scores = highest - temperature * (16 - steps).to(tl.float32)
    keys = tl.maximum(_keys_of(scores), low)
    return tl.where(steps == 0, low, keys)


@triton.jit
def _brackets(
    keys: tl.tensor,
    bounds: tl.tensor,
    tables: tl.tensor,
    parameters: tl.tensor,
    highest: tl.tensor,
    row: tl.tensor,
    capacity: tl.constexpr,
    level: tl.constexpr,
) -> tuple:  # type: ignore[type-arg]  # 18 scalars
    """Return the three brackets after the pass of this level, from those before it."""
    at = (level * tl.num_programs(0) + row) * 3
    k_low = tl.load(keys + at * 2)
    k_high = tl.load(keys + at * 2 + 1)
    k_wa = tl.load(bounds + at * 4)
    k_ca = tl.load(bounds + at * 4 + 1)
    k_ww = tl.load(bounds + at * 4 + 2)
    k_cw = tl.load(bounds + at * 4 + 3)
    p_low = tl.load(keys + at * 2 + 2)
    p_high = tl.load(keys + at * 2 + 3)
    p_wa = tl.load(bounds + at * 4 + 4)
    p_ca = tl.load(bounds + at * 4 + 5)
    p_ww = tl.load(bounds + at * 4 + 6)
    p_cw = tl.load(bounds + at * 4 + 7)
    u_low = tl.load(keys + at * 2 + 4)
    u_high = tl.load(keys + at * 2 + 5)
    u_wa = tl.load(bounds + at * 4 + 8)
    u_ca = tl.load(bounds + at * 4 + 9)
    u_ww = tl.load(bounds + at * 4 + 10)
    u_cw = tl.load(bounds + at * 4 + 11)
    if k_cw - k_ca + p_cw - p_ca + u_cw - u_ca > capacity:
        temperature = _parameter(parameters, TEMPERATURE, row).to(tl.float32)
        top_k = _parameter(parameters, TOP_K, row).to(tl.float32)
        top_p = _parameter(parameters, TOP_P, row).to(tl.float32)
        uniform = _parameter(parameters, UNIFORM, row).to(tl.float32)
        table = tables + at * 32 + tl.arange(0, 16)
        p_shift: tl.constexpr = 32 if level > 0 else 0
        k_keys = _keys_between(k_low, k_high, highest, temperature, level)
        k_weights = tl.load(table)
        k_counts = tl.load(table + 16)
        p_keys = _keys_between(p_low, p_high, highest, temperature, level)
        p_weights = tl.load(table + p_shift)
        p_counts = tl.load(table + p_shift + 16)
        u_keys = _keys_between(u_low, u_high, highest, temperature, level)
        u_weights = tl.load(table + 2 * p_shift)
        u_counts = tl.load(table + 2 * p_shift + 16)
        if level == 0:
            # Of everything above the floor.
            weight = tl.max(k_weights, axis=0)
            count = tl.max(k_counts, axis=0)
            if top_k >= count:
                k_high = k_low
                k_wa = weight
                k_ww = weight
                k_ca = count
                k_cw = count
        if k_low < k_high:
            k_low, k_high, k_wa, k_ca, k_ww, k_cw = _narrow(
                k_keys, k_counts, k_weights, k_counts, top_k, top_k,
                k_low, k_high, k_wa, k_ca, k_ww, k_cw,
            )  # fmt: skip
        if top_p < 1.0:
            p_low, p_high, p_wa, p_ca, p_ww, p_cw = _narrow(
                p_keys, p_weights, p_weights, p_counts,
                (top_p - MARGIN) * k_wa, (top_p + MARGIN) * k_ww,
                p_low, p_high, p_wa, p_ca, p_ww, p_cw,
            )  # fmt: skip
        else:
            p_high = p_low
            p_wa = k_wa
            p_ww = k_ww
            p_ca = k_ca * 0.0
            p_cw = k_ca * 0.0
        u_low, u_high, u_wa, u_ca, u_ww, u_cw = _narrow(
            u_keys, u_weights, u_weights, u_counts,
            (uniform - MARGIN) * p_wa, (uniform + MARGIN) * p_ww,
            u_low, u_high, u_wa, u_ca, u_ww, u_cw,
        )  # fmt: skip
    return (
        k_low, k_high, k_wa, k_ca, k_ww, k_cw,
        p_low, p_high, p_wa, p_ca, p_ww, p_cw,
        u_low, u_high, u_wa, u_ca, u_ww, u_cw,
    )  # fmt: skip


@triton.jit
def _store_bracket(
    keys: tl.tensor,
    bounds: tl.tensor,
    at: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    weight_above: tl.tensor,
    count_above: tl.tensor,
    weight_within: tl.tensor,
    count_within: tl.tensor,
) -> None:
    tl.store(keys + at * 2, low)
    tl.store(keys + at * 2 + 1, high)
    tl.store(bounds + at * 4, weight_above)
    tl.store(bounds + at * 4 + 1, count_above)
    tl.store(bounds + at * 4 + 2, weight_within)
    tl.store(bounds + at * 4 + 3, count_within)


@triton.jit
def _add_above(
    table: tl.tensor,
    scores: tl.tensor,
    thresholds: tl.tensor,
    floor: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    vocab_size: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Add weight and count of the tokens of a part of a row above each threshold."""
    weights_above = tl.zeros((tile, 16), tl.float32)
    counts_above = tl.zeros((tile, 16), tl.float32)
    for start in range(first, end, tile):
        keys, _ = _load_keys(scores, start, vocab_size, tile)
        weights = _weights_of(keys, highest, scale)
        is_above = keys[:, None] >= thresholds[None, :]
        weights_above += tl.where(is_above, weights[:, None], 0.0)
        counts_above += tl.where(is_above, 1.0, 0.0)
    columns = tl.arange(0, 16)
    tl.atomic_add(table + columns, tl.sum(weights_above, axis=0), sem="relaxed")
    tl.atomic_add(table + 16 + columns, tl.sum(counts_above, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["splits"])
def _sum_above(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    keys: tl.tensor,
    bounds: tl.tensor,
    tables: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    capacity: tl.constexpr,
    level: tl.constexpr,
    splits: tl.tensor,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    highest_key = (_row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not _is_sound(highest_key):
        return
    highest = _score_of(highest_key)
    scale = _parameter(parameters, SCALE, row).to(tl.float32)
    temperature = _parameter(parameters, TEMPERATURE, row).to(tl.float32)
    floor = _floor_key(parameters, highest, row)
    scores += tl.load(indices + row) * row_stride
    first = split * split_size
    end = tl.minimum(first + split_size, vocab_size)
    at = (level * tl.num_programs(0) + row) * 3
    if level == 0:
        zero = highest * 0.0
        if split == 0:
            for query in tl.static_range(3):
                _store_bracket(
                    keys, bounds, at + query, floor, highest_key + 1, zero, zero, zero + INF,
                    zero + INF,
                )  # fmt: skip
        thresholds = _keys_between(floor, highest_key + 1, highest, temperature, 0)
        _add_above(
            tables + at * 32, scores, thresholds, floor, highest, scale, first, end, vocab_size,
            tile,
        )  # fmt: skip
    else:
        (
            k_low, k_high, k_wa, k_ca, k_ww, k_cw,
            p_low, p_high, p_wa, p_ca, p_ww, p_cw,
            u_low, u_high, u_wa, u_ca, u_ww, u_cw,
        ) = _brackets(
            keys, bounds, tables, parameters, highest, row, capacity, level - 1
        )  # fmt: skip
        if split == 0:
            _store_bracket(keys, bounds, at, k_low, k_high, k_wa, k_ca, k_ww, k_cw)
            _store_bracket(keys, bounds, at + 1, p_low, p_high, p_wa, p_ca, p_ww, p_cw)
            _store_bracket(keys, bounds, at + 2, u_low, u_high, u_wa, u_ca, u_ww, u_cw)
        if k_cw - k_ca + p_cw - p_ca + u_cw - u_ca > capacity:
            if k_low < k_high:
                thresholds = _keys_between(k_low, k_high, highest, temperature, 1)
                _add_above(
                    tables + at * 32, scores, thresholds, floor, highest, scale, first, end,
                    vocab_size, tile,
                )  # fmt: skip
            if p_low < p_high:
                thresholds = _keys_between(p_low, p_high, highest, temperature, 1)
                _add_above(
                    tables + at * 32 + 32, scores, thresholds, floor, highest, scale, first, end,
                    vocab_size, tile,
                )  # fmt: skip
            thresholds = _keys_between(u_low, u_high, highest, temperature, 1)
            _add_above(
                tables + at * 32 + 64, scores, thresholds, floor, highest, scale, first, end,
                vocab_size, tile,
            )  # fmt: skip


@triton.jit
def _floor_key(parameters: tl.tensor, highest: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return the key of the least score that min_p keeps."""
    bound = highest.to(tl.float64) + _parameter(parameters, FLOOR, row)
    rounded = bound.to(tl.float32)
    key = _keys_of(rounded)
    key = tl.where(rounded.to(tl.float64) < bound, key + 1, key)
    return tl.maximum(key, SMALLEST_KEY + 1)


@triton.jit(do_not_specialize=["splits"])
def _collect(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    keys: tl.tensor,
    bounds: tl.tensor,
    tables: tl.tensor,
    sums: tl.tensor,
    candidates: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    capacity: tl.constexpr,
    levels: tl.constexpr,
    splits: tl.tensor,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    highest_key = (_row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not _is_sound(highest_key):
        return
    highest = _score_of(highest_key)
    scale = _parameter(parameters, SCALE, row).to(tl.float32)
    floor = _floor_key(parameters, highest, row)
    scores += tl.load(indices + row) * row_stride
    first = split * split_size
    (
        k_low, k_high, k_wa, k_ca, k_ww, k_cw,
        p_low, p_high, p_wa, p_ca, p_ww, p_cw,
        u_low, u_high, u_wa, u_ca, u_ww, u_cw,
    ) = _brackets(keys, bounds, tables, parameters, highest, row, capacity, levels - 1)  # fmt: skip
    if split == 0:
        at = (levels * tl.num_programs(0) + row) * 3
        _store_bracket(keys, bounds, at, k_low, k_high, k_wa, k_ca, k_ww, k_cw)
        _store_bracket(keys, bounds, at + 1, p_low, p_high, p_wa, p_ca, p_ww, p_cw)
        _store_bracket(keys, bounds, at + 2, u_low, u_high, u_wa, u_ca, u_ww, u_cw)
    is_few = k_cw - k_ca + p_cw - p_ca + u_cw - u_ca <= capacity
    total = tl.zeros((tile,), tl.int64)
    k_above = tl.zeros((tile,), tl.int64)
    p_above = tl.zeros((tile,), tl.int64)
    u_above = tl.zeros((tile,), tl.int64)
    # Counts of everything and of what lies above the bracket of top_k.
    counts = tl.zeros((tile,), tl.int64)
    sums += row * NUM_SUMS
    for start in range(first, tl.minimum(first + split_size, vocab_size), tile):
        tile_keys, ids = _load_keys(scores, start, vocab_size, tile)
        units = _units_of(tile_keys, highest, scale)
        is_kept = tile_keys >= floor
        total += tl.where(is_kept, units, 0)
        k_above += tl.where(tile_keys >= k_high, units, 0)
        p_above += tl.where(tile_keys >= p_high, units, 0)
        u_above += tl.where(tile_keys >= u_high, units, 0)
        counts += is_kept.to(tl.int64) + ((tile_keys >= k_high).to(tl.int64) << 32)
        if is_few:
            is_candidate = (tile_keys >= k_low) & (tile_keys < k_high)
            is_candidate |= (tile_keys >= p_low) & (tile_keys < p_high)
            is_candidate |= (tile_keys >= u_low) & (tile_keys < u_high)
            is_candidate &= is_kept
            counter = sums + 5 + tl.zeros((tile,), tl.int64)
            ones = tl.full((tile,), 1, tl.int64)
            place = tl.atomic_add(counter, ones, mask=is_candidate, sem="relaxed")
            packed = (tile_keys.to(tl.int64) << 32) | ids.to(tl.int64)
            is_placed = is_candidate & (place < capacity)
            tl.store(candidates + row * capacity + place, packed, mask=is_placed)
    tl.atomic_add(sums, tl.sum(total, axis=0), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(k_above, axis=0), sem="relaxed")
    tl.atomic_add(sums + 2, tl.sum(p_above, axis=0), sem="relaxed")
    tl.atomic_add(sums + 3, tl.sum(u_above, axis=0), sem="relaxed")
    tl.atomic_add(sums + 4, tl.sum(counts, axis=0), sem="relaxed")


@triton.jit
def _sum_from(
    scores: tl.tensor,
    candidates: tl.tensor,
    is_few: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the weight and the count of the tokens whose keys are in `[low, high)`."""
    units = tl.zeros((tile,), tl.int64)
    counts = tl.zeros((tile,), tl.int32)
    for start in range(0, size, tile):
        keys, _ = _load_either(scores, candidates, is_few, start, size, tile)
        is_within = (keys >= low) & (keys < high)
        units += tl.where(is_within, _units_of(keys, highest, scale), 0)
        counts += is_within.to(tl.int32)
    return tl.sum(units, axis=0), tl.sum(counts, axis=0)


@triton.jit
def _load_either(
    scores: tl.tensor,
    candidates: tl.tensor,
    is_few: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return keys and ids of a tile of the candidates, or of the row if they are too many."""
    places = start + tl.arange(0, tile)
    # One of both is empty.
    packed = tl.load(candidates + places, mask=places < size * is_few, other=EMPTY)
    loaded = tl.load(scores + places, mask=places < size * (1 - is_few), other=-INF)
    keys = tl.maximum((packed >> 32).to(tl.int32), _keys_of(loaded))
    return keys, tl.where(packed == EMPTY, places, (packed & 0xFFFFFFFF).to(tl.int32))


@triton.jit
def _crossing(
    scores: tl.tensor,
    candidates: tl.tensor,
    is_few: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    weight_above: tl.tensor,
    count_above: tl.tensor,
    limit: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    by_count: tl.constexpr,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the key at which the sum reaches the limit, and weight and count above that key."""
    first, last = low.to(tl.int64), high.to(tl.int64)
    # The crossing is at `first` or above it, and below `last`.
    while last - first > 1:
        middle = (first + last) >> 1
        weight, count = _sum_from(
            scores, candidates, is_few, size, middle, last, highest, scale, tile
        )
        reached = count_above + count if by_count else weight_above + weight
        if reached >= limit:
            first = middle
        else:
            last = middle
            weight_above += weight
            count_above += count
    return first, weight_above, count_above


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
) -> tl.tensor:
    """Return the id of the token of this key that has `place` lower ones."""
    low = tl.zeros((), tl.int64)
    high = low + vocab_size
    while high - low > 1:
        middle = (low + high) >> 1
        counts = tl.zeros((tile,), tl.int32)
        for start in range(0, size, tile):
            keys, ids = _load_either(scores, candidates, is_few, start, size, tile)
            counts += ((keys == key) & (ids < middle)).to(tl.int32)
        if tl.sum(counts, axis=0) > place:
            high = middle
        else:
            low = middle
    return low


@triton.jit(do_not_specialize=["splits"])
def _draw_filtered(
    scores: tl.tensor,
    indices: tl.tensor,
    parameters: tl.tensor,
    maxima: tl.tensor,
    bracket_keys: tl.tensor,
    sums: tl.tensor,
    candidates: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    capacity: tl.constexpr,
    levels: tl.constexpr,
    splits: tl.tensor,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    highest_key = (_row_maximum(maxima, row, splits) >> 32).to(tl.int32)
    if not _is_sound(highest_key):
        tl.store(out + row, NO_TOKEN)
        return
    highest = _score_of(highest_key)
    scale = _parameter(parameters, SCALE, row).to(tl.float32)
    top_k = _parameter(parameters, TOP_K, row).to(tl.int64)
    top_p = _parameter(parameters, TOP_P, row)
    uniform = _parameter(parameters, UNIFORM, row)
    scores += tl.load(indices + row) * row_stride
    candidates += row * capacity
    sums += row * NUM_SUMS
    total = tl.load(sums)
    k_weight = tl.load(sums + 1)
    p_weight = tl.load(sums + 2)
    u_weight = tl.load(sums + 3)
    counts = tl.load(sums + 4)
    num_candidates = tl.load(sums + 5)
    at = (levels * tl.num_programs(0) + row) * 6
    k_low, k_high = tl.load(bracket_keys + at), tl.load(bracket_keys + at + 1)
    p_low, p_high = tl.load(bracket_keys + at + 2), tl.load(bracket_keys + at + 3)
    u_low, u_high = tl.load(bracket_keys + at + 4), tl.load(bracket_keys + at + 5)
    is_few = ((num_candidates > 0) & (num_candidates <= capacity)).to(tl.int32)
    size = tl.where(is_few != 0, num_candidates, vocab_size).to(tl.int32)
    zero = tl.zeros((), tl.int64)
    num_kept = counts & 0xFFFFFFFF
    if top_k < num_kept:
        key, above, count = _crossing(
            scores, candidates, is_few, size, k_low, k_high, k_weight, counts >> 32, top_k,
            highest, scale, True, tile,
        )  # fmt: skip
        total = above + (top_k - count) * _units_of(key.to(tl.int32), highest, scale)
    kept = total
    if top_p < 1.0:
        limit = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        limit = tl.minimum(limit, total)
        key, above, _ = _crossing(
            scores, candidates, is_few, size, p_low, p_high, p_weight, zero, limit,
            highest, scale, False, tile,
        )  # fmt: skip
        unit = tl.maximum(_units_of(key.to(tl.int32), highest, scale), 1)
        kept = above + ((limit - above + unit - 1) // unit) * unit
    drawn = tl.minimum((uniform * kept.to(tl.float64)).to(tl.int64), kept - 1)
    key, above, _ = _crossing(
        scores, candidates, is_few, size, u_low, u_high, u_weight, zero, drawn + 1,
        highest, scale, False, tile,
    )  # fmt: skip
    unit = tl.maximum(_units_of(key.to(tl.int32), highest, scale), 1)
    place = (drawn - above) // unit
    token_id = _id_among_equals(
        scores, candidates, is_few, size, key, place, vocab_size, tile
    )  # fmt: skip
    tl.store(out + row, token_id)


def num_splits(num_rows: int, vocab_size: int) -> int:
    """Return among how many programs the scores of a row are divided, at most 32."""
    most: int = min(triton.cdiv(vocab_size, _CHUNK), MAX_SPLITS.value)
    return min(most, max(1, _PROGRAMS // num_rows))


def choose_greedy(scores: torch.Tensor, indices: torch.Tensor, *, tile: int = 1024) -> torch.Tensor:
    """Return the likeliest tokens of `scores[indices]`, int64; -1 for a broken row."""
    rows = _Rows(scores, indices)
    rows.find_maxima(tile, levels=0)
    _take_maxima[(rows.num_rows,)](rows.scratch.maxima, rows.out, splits=rows.splits, num_warps=1)
    return rows.out


def choose_unfiltered(
    scores: torch.Tensor, indices: torch.Tensor, parameters: torch.Tensor, *, tile: int = 1024
) -> torch.Tensor:
    """Return tokens drawn from `scores[indices]`, int64; -1 for a broken row.

    `parameters` is float64 `[6, num_rows]`: log2(e) / temperature, temperature, top_k, top_p,
    temperature * log(min_p), uniform.
    """
    rows = _Rows(scores, indices)
    rows.find_maxima(tile, levels=0)
    scratch = rows.scratch
    common = (scores, indices, parameters, scratch.maxima, scratch.chunk_sums)
    sizes = {"splits": rows.splits, "tile": tile, "num_warps": 4}
    _sum_chunks[(rows.num_rows, rows.splits)](*common, *rows.shape, **sizes)
    _draw_unfiltered[(rows.num_rows,)](*common, rows.out, *rows.shape, **sizes)
    return rows.out


def choose_filtered(
    scores: torch.Tensor,
    indices: torch.Tensor,
    parameters: torch.Tensor,
    *,
    tile: int = 1024,
    sum_tile: int = 256,
    collect_tile: int = 512,
    capacity: int = 4096,
) -> torch.Tensor:
    """Return tokens drawn from what min_p, top_k and top_p leave; see `choose_unfiltered`."""
    rows = _Rows(scores, indices, capacity)
    rows.find_maxima(tile, levels=_LEVELS)
    scratch, grid = rows.scratch, (rows.num_rows, rows.splits)
    common = (scores, indices, parameters, scratch.maxima)
    search = (scratch.keys, scratch.bounds, scratch.tables)
    for level in range(_LEVELS):
        _sum_above[grid](
            *common,
            *search,
            *rows.shape,
            capacity=capacity,
            level=level,
            splits=rows.splits,
            tile=sum_tile,
            num_warps=4,
        )
    sizes = {"capacity": capacity, "levels": _LEVELS, "splits": rows.splits}
    _collect[grid](
        *common,
        *search,
        scratch.sums,
        scratch.candidates,
        *rows.shape,
        **sizes,
        tile=collect_tile,
        num_warps=4,
    )
    _draw_filtered[(rows.num_rows,)](
        *common,
        scratch.keys,
        scratch.sums,
        scratch.candidates,
        rows.out,
        *rows.shape[:2],
        **sizes,
        tile=tile,
        num_warps=4,
    )
    return rows.out


class _Rows:
    """The rows of one call, and how they are divided among programs."""

    def __init__(self, scores: torch.Tensor, indices: torch.Tensor, capacity: int = 0) -> None:
        assert scores.stride(1) == 1
        assert indices.dtype == torch.int64
        self._scores = scores
        self._indices = indices
        self.num_rows = len(indices)
        vocab_size = scores.shape[1]
        assert self.num_rows > 0
        self.splits = num_splits(self.num_rows, vocab_size)
        split_size = triton.cdiv(triton.cdiv(vocab_size, self.splits), 1024) * 1024
        self.shape = scores.stride(0), vocab_size, split_size
        self.scratch = ChoiceScratch.make(self.num_rows, capacity, scores.device)
        self.out = torch.empty(self.num_rows, dtype=torch.int64, device=scores.device)

    def find_maxima(self, tile: int, *, levels: int) -> None:
        """Find the maximum of each part of each row, and clear what the search adds to."""
        _find_maxima[(self.num_rows, self.splits)](
            self._scores,
            self._indices,
            self.scratch.maxima,
            self.scratch.tables,
            self.scratch.sums,
            *self.shape,
            splits=self.splits,
            levels=levels,
            tile=tile,
            num_warps=4,
        )
