"""Launches the sampling kernels, without waiting for the device; samples unfiltered rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.triton.choice.filtered import collect_candidates, draw_filtered
from attention.kernels.triton.choice.scores import (
    INF,
    MAX_SPLITS,
    NAN_KEY,
    NO_TOKEN,
    NUM_PARAMETERS,
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
from attention.kernels.triton.choice.threshold_sample import start_search
from attention.kernels.triton.choice.threshold_search import (
    MAX_SPLIT_SIZE,
    narrow_brackets,
    sum_above,
    sum_kept,
)

__all__ = [
    "argmax",
    "choose_filtered",
    "choose_greedy",
    "choose_unfiltered",
    "local_maxima",
]

_CHUNK = 4096
"""Scores are divided among programs in multiples of this number."""
_TILE = 1024
"""Scores that a program reads at a time."""
_PROGRAMS = 2048
"""Approximate number of programs that are launched for a pass over the rows."""
_PASSES = 4
"""Passes that narrow the brackets. Usually one or two passes suffice; the others return at once."""
_SAMPLE_RUN = 32
_LANES = 128
_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Lower bits of a float32 that scores of the dtype leave zero."""


def choose_greedy(scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the likeliest tokens of `scores[indices]`, int64 `[num_rows]`.

    If the maximum of a row is not finite, its token is -1.
    """
    rows = _Rows.of(scores, indices)
    maxima, out = rows.find_maxima(), rows.empty(torch.int64)
    _take_maxima(maxima, out, splits=rows.splits)
    return out


def local_maxima(scores: torch.Tensor, indices: torch.Tensor, first_id: int) -> torch.Tensor:
    """Return the largest key of each row of `scores[indices]` with its id, int64 `[num_rows]`.

    Ids are counted from `first_id`.
    """
    rows = _Rows.of(scores, indices)
    maxima, out = rows.find_maxima(), rows.empty(torch.int64)
    join_maxima[(rows.num_rows,)](maxima, out, splits=rows.splits, first_id=first_id, num_warps=1)
    return out


def argmax(local_maxima: torch.Tensor) -> torch.Tensor:
    """Return the likeliest tokens, int64, from the local maxima of all parts, `[num_rows, parts]`.

    If the maximum of a row is not finite, its token is -1.
    """
    num_rows, num_parts = local_maxima.shape
    assert num_parts <= MAX_SPLITS.value
    out = torch.empty(num_rows, dtype=torch.int64, device=local_maxima.device)
    _take_maxima(local_maxima.contiguous(), out, splits=num_parts)
    return out


def _take_maxima(maxima: torch.Tensor, out: torch.Tensor, *, splits: int) -> None:
    stride = maxima.shape[1]
    take_maxima[(len(out),)](maxima, out, splits=splits, stride=stride, num_warps=1)


def choose_unfiltered(
    scores: torch.Tensor, indices: torch.Tensor, parameters: torch.Tensor
) -> torch.Tensor:
    """Return tokens sampled from `scores[indices]`, int64 `[num_rows]`.

    If the maximum of a row is not finite, its token is -1. `parameters` is float64 `[5, num_rows]`:
    log2(e) / temperature, top_k, top_p, temperature * log(min_p), uniform.
    """
    assert parameters.shape == (NUM_PARAMETERS, len(indices))
    rows = _Rows.of(scores, indices)
    maxima, out = rows.find_maxima(), rows.empty(torch.int64)
    chunk_sums = rows.empty(torch.int64, MAX_SPLITS.value)
    common = (scores, indices, parameters, maxima, chunk_sums)
    sizes = {"splits": rows.splits, "tile": _TILE, "num_warps": 4}
    sum_chunks[(rows.num_rows, rows.splits)](*common, *rows.shape, **sizes)
    draw_unfiltered[(rows.num_rows,)](*common, out, *rows.shape, **sizes)
    return out


def choose_filtered(
    scores: torch.Tensor,
    indices: torch.Tensor,
    parameters: torch.Tensor,
    *,
    sample_size: int,
    capacity: int,
) -> torch.Tensor:
    """Return tokens sampled after min_p, top_k and top_p, int64 `[num_rows]`.

    Other arguments as in `choose_unfiltered`. The first edges are estimated from `sample_size`
    tokens of each row, and at most `capacity` candidates of a row are collected. Both are powers of
    two.
    """
    assert parameters.shape == (NUM_PARAMETERS, len(indices))
    rows = _Rows.of(scores, indices)
    num_rows, vocab_size = rows.num_rows, scores.shape[1]
    sample_size = min(sample_size, max(_SAMPLE_RUN, triton.next_power_of_2(vocab_size)))
    maxima, out = rows.find_maxima(), rows.empty(torch.int64)
    kept = rows.empty(torch.int64, 2, MAX_SPLITS.value)
    brackets, sums = rows.empty(torch.int64, 4, 8), rows.empty(torch.int64, 2, 8)
    edge_keys, edges = rows.empty(torch.int32, 8), rows.empty(torch.float32, 8)
    open_flags, counters = rows.empty(torch.int32), rows.empty(torch.int32)
    equals = rows.empty(torch.int32, MAX_SPLITS.value)
    candidates = rows.empty(torch.int32, capacity)
    sample = rows.empty(torch.float32, 3, sample_size)
    shift, splits = _SHIFTS[scores.dtype], rows.splits
    read = {"splits": splits, "lanes": _LANES, "width": 16 // scores.element_size()}
    search = {"splits": splits, "size": sample_size, "shift": shift, "num_warps": 8}
    common, grid = (scores, indices, parameters, maxima), (num_rows, splits)
    state = (brackets, edge_keys, edges, sums, open_flags)
    sum_kept[grid](*common, kept, *rows.shape, **read, shift=shift, num_warps=4)
    start_search[(num_rows,)](
        *common,
        kept,
        *state,
        counters,
        sample,
        *rows.shape[:2],
        stride=max(_SAMPLE_RUN, vocab_size * _SAMPLE_RUN // sample_size),
        num_sampled=min(sample_size, vocab_size),
        capacity=capacity,
        **search,
    )
    for _ in range(_PASSES):
        sum_above[grid](*common, edges, sums, open_flags, *rows.shape, **read, num_warps=4)
        narrow_brackets[(num_rows,)](
            parameters, maxima, *state, sample, capacity=capacity, **search
        )  # fmt: skip
    found = (brackets, open_flags, counters, equals, candidates)
    collect_candidates[grid](
        scores,
        indices,
        maxima,
        *found,
        *rows.shape,
        **read,
        capacity=capacity,
        shift=shift,
        num_warps=4,
    )
    draw_filtered[(num_rows,)](
        *common,
        *found,
        out,
        *rows.shape,
        splits=splits,
        capacity=capacity,
        tile=4 * _TILE,
        shift=shift,
        num_warps=8,
    )
    return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """The rows of one call, and how they are divided among programs."""

    scores: torch.Tensor
    indices: torch.Tensor
    num_rows: int
    splits: int
    """Programs of a row, at most 32."""
    shape: tuple[int, int, int]
    """Row stride, size of the vocabulary, and how much of it is a program's."""

    @classmethod
    def of(cls, scores: torch.Tensor, indices: torch.Tensor) -> _Rows:
        """Divide each row among so many programs that together they occupy a GPU."""
        assert scores.stride(1) == 1
        assert indices.dtype == torch.int64
        num_rows, vocab_size = len(indices), scores.shape[1]
        assert num_rows > 0
        splits = min(triton.cdiv(vocab_size, _CHUNK), MAX_SPLITS.value, _PROGRAMS // num_rows)
        splits = max(1, splits, triton.cdiv(vocab_size, MAX_SPLIT_SIZE))
        split_size = triton.cdiv(triton.cdiv(vocab_size, splits), _TILE) * _TILE
        shape = scores.stride(0), vocab_size, split_size
        return cls(scores=scores, indices=indices, num_rows=num_rows, splits=splits, shape=shape)

    def empty(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Return memory of the kernels, `[num_rows, ...]`."""
        return torch.empty((self.num_rows, *shape), dtype=dtype, device=self.scores.device)

    def find_maxima(self) -> torch.Tensor:
        """Return the largest key and its id of each part of each row, `[num_rows, MAX_SPLITS]`."""
        maxima = self.empty(torch.int64, MAX_SPLITS.value)
        find_maxima[(self.num_rows, self.splits)](
            self.scores,
            self.indices,
            maxima,
            *self.shape,
            splits=self.splits,
            tile=_TILE,
            num_warps=4,
        )
        return maxima


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
