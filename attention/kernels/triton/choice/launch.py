"""Launches the sampling kernels, without waiting for the device; finds the maxima of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.triton.choice.filtered import collect_candidates, find_cuts
from attention.kernels.triton.choice.scores import (
    INF,
    MAX_SPLITS,
    NAN_KEY,
    NO_TOKEN,
    NOISE_KEY,
    NUM_PARAMETERS,
    SCALE,
    is_sound,
    keys_of,
    load_scores,
    noise_bounds,
    noise_of,
    parameter,
    row_maximum,
)
from attention.kernels.triton.choice.threshold_sample import start_search
from attention.kernels.triton.choice.threshold_search import (
    MAX_SPLIT_SIZE,
    narrow_brackets,
    sum_above,
    sum_kept,
)
from attention.kernels.triton.kernel_launcher import KernelLauncher

__all__ = ["argmax", "choose_filtered", "choose_greedy", "choose_unfiltered", "local_maxima"]

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
    return rows.take_maxima(rows.find_maxima())


def local_maxima(
    scores: torch.Tensor,
    indices: torch.Tensor,
    first_id: int,
    parameters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the largest key of each row of `scores[indices]` with its id, int64 `[num_rows]`.

    Ids are counted from `first_id`. With `parameters`, as of `choose_unfiltered`, keys are of sums
    of scores over temperatures and noise.
    """
    rows = _Rows.of(scores, indices)
    maxima, out = rows.find_maxima(parameters, first_id=first_id), rows.empty(torch.int64)
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
    _TAKE_MAXIMA.launch((len(out), 1, 1), (maxima, out), (splits, maxima.shape[1]), num_warps=1)


def choose_unfiltered(
    scores: torch.Tensor, indices: torch.Tensor, parameters: torch.Tensor
) -> torch.Tensor:
    """Return tokens sampled from `scores[indices]`, int64 `[num_rows]`.

    If the maximum of a row is not finite, its token is -1. `parameters` is float64 `[5, num_rows]`:
    1 / temperature, top_k, top_p, temperature * log(min_p), and the bits of the key of the noise.
    """
    rows = _Rows.of(scores, indices)
    return rows.take_maxima(rows.find_maxima(parameters))


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
    maxima = rows.find_maxima()
    kept = rows.empty(torch.int64, 2, MAX_SPLITS.value)
    brackets, sums = rows.empty(torch.int64, 3, 8), rows.empty(torch.int64, 2, 4)
    edge_keys, edges = rows.empty(torch.int32, 4), rows.empty(torch.float32, 4)
    cuts = rows.empty(torch.float32), rows.empty(torch.int64)
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
        *common, *found, *rows.shape, **read, capacity=capacity, shift=shift, num_warps=4
    )
    find_cuts[(num_rows,)](
        *common,
        *found,
        *cuts,
        *rows.shape,
        splits=splits,
        capacity=capacity,
        tile=4 * _TILE,
        shift=shift,
        num_warps=8,
    )
    return rows.take_maxima(rows.find_maxima(parameters, cuts))


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

    def find_maxima(
        self,
        parameters: torch.Tensor | None = None,
        cuts: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        first_id: int = 0,
    ) -> torch.Tensor:
        """Return the largest key and its id of each part of each row, `[num_rows, MAX_SPLITS]`."""
        maxima = self.empty(torch.int64, MAX_SPLITS.value)
        given = () if parameters is None else (parameters, *(cuts or ()))
        _FIND_MAXIMA.launch(
            (self.num_rows, self.splits, 1),
            (self.scores, self.indices, maxima, *given),
            (*(None,) * (3 - len(given)), *self.shape, self.splits, first_id, _TILE),
            num_warps=4,
            # Noise is equal on all devices only if no product and sum are fused.
            enable_fp_fusion=False,
        )
        return maxima

    def take_maxima(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the largest keys, int64 `[num_rows]`."""
        out = self.empty(torch.int64)
        _take_maxima(maxima, out, splits=self.splits)
        return out


@triton.jit
def _larger(
    best: tl.tensor, best_ids: tl.tensor, values: tl.tensor, ids: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the larger values with their ids; each lane keeps the first of equal values."""
    is_better = values > best
    return tl.where(is_better, values, best), tl.where(is_better, ids, best_ids)


@triton.jit(do_not_specialize=["splits", "first_id"])
def find_maxima(
    scores: tl.tensor,
    indices: tl.tensor,
    maxima: tl.tensor,
    parameters: tl.tensor | None,
    cut_scores: tl.tensor | None,
    cut_ids: tl.tensor | None,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    split_size: tl.tensor,
    splits: tl.tensor,
    first_id: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Write the largest key and its lowest id of each part of each row.

    `maxima` is int64 `[num_rows, 32]`: the key in the upper half, the inverted id in the lower.
    Keys are of scores, or with `parameters` of scores over temperatures with noise. Tokens below
    the cuts have the key of -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    scores += tl.load(indices + row) * row_stride
    first = split * split_size
    best = tl.full((tile,), -INF, tl.float32)
    best_ids = first + tl.arange(0, tile)
    is_nan = tl.full((tile,), False, tl.int1)
    if parameters is not None:
        scale = parameter(parameters, SCALE, row).to(tl.float32)
        key = parameter(parameters, NOISE_KEY, row).to(tl.int64, bitcast=True)
        highest = tl.full((), -INF, tl.float32)
    if cut_scores is not None:
        cut = tl.load(cut_scores + row)
        cut_id = tl.load(cut_ids + row)
    for start in range(first, tl.minimum(first + split_size, vocab_size), tile):
        values, ids = load_scores(scores, start, vocab_size, tile)
        is_nan |= values != values
        if cut_scores is not None:
            is_kept = (values > cut) | ((values == cut) & (ids <= cut_id))
            values = tl.where(is_kept, values, -INF)
        if parameters is None:
            best, best_ids = _larger(best, best_ids, values, ids)
        else:
            values *= scale
            # Few tiles may have the highest sum.
            if tl.max(values + noise_bounds(ids + first_id, key), axis=0) > highest:
                values += noise_of(ids + first_id, key)
                best, best_ids = _larger(best, best_ids, values, ids)
                highest = tl.max(best, axis=0)
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


_FIND_MAXIMA = KernelLauncher(find_maxima)
_TAKE_MAXIMA = KernelLauncher(take_maxima)
