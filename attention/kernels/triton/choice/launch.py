"""Launches the sampling kernels, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from attention.kernels.triton.choice.filtered import collect_candidates, draw_filtered
from attention.kernels.triton.choice.scores import MAX_SPLITS, NUM_PARAMETERS
from attention.kernels.triton.choice.threshold_sample import start_search
from attention.kernels.triton.choice.threshold_search import (
    MAX_SPLIT_SIZE,
    narrow_brackets,
    sum_above,
    sum_kept,
)
from attention.kernels.triton.choice.unfiltered import (
    draw_unfiltered,
    find_maxima,
    join_maxima,
    sum_chunks,
    take_maxima,
)

__all__ = [
    "choose_filtered",
    "choose_greedy",
    "choose_unfiltered",
    "find_leaders",
    "take_leaders",
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


def find_leaders(scores: torch.Tensor, indices: torch.Tensor, first_id: int) -> torch.Tensor:
    """Return the largest key of each row of `scores[indices]` with its id, int64 `[num_rows]`.

    Ids are counted from `first_id`.
    """
    rows = _Rows.of(scores, indices)
    maxima, out = rows.find_maxima(), rows.empty(torch.int64)
    join_maxima[(rows.num_rows,)](maxima, out, splits=rows.splits, first_id=first_id, num_warps=1)
    return out


def take_leaders(leaders: torch.Tensor) -> torch.Tensor:
    """Return the likeliest tokens, int64, from the leaders of all parts, `[num_rows, parts]`.

    If the maximum of a row is not finite, its token is -1.
    """
    num_rows, num_parts = leaders.shape
    assert num_parts <= MAX_SPLITS.value
    out = torch.empty(num_rows, dtype=torch.int64, device=leaders.device)
    _take_maxima(leaders.contiguous(), out, splits=num_parts)
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
