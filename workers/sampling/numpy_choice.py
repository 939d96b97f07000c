"""The choice on the CPU: row by row in NumPy, but for draws, and the first of bfloat16 scores.

A row stays in the core's cache from its first pass to its last, NumPy's `argmax`, `partition` and
`sort` are vectorized where torch's are not, and no pass waits for a pool of threads.
Only tokens that may survive the filters are sorted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.kernels.cpu.draw import Draw
from attention.kernels.cpu.greedy import Greedy
from workers.sampling.choice import Choice, Draws, IntArray

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["NumpyChoice"]

Row = NDArray[np.float32]

# Widens bounds that are computed with other rounding; exact tests follow.
SLACK = 0.99
# If top_p alone limits a row, tokens of less weight are sorted only if these are too few.
CANDIDATE_WEIGHTS = (0.05, 0.001)


class NumpyChoice(Choice):
    """Chooses from scores on the CPU."""

    def __init__(self) -> None:
        self._greedy = Greedy.make()
        self._draw = Draw.make()

    def greedy(self, scores: Tensor, indices: IntArray) -> Tensor:
        if self._greedy is not None and scores.dtype == torch.bfloat16 and scores.stride(1) == 1:
            return self._greedy(scores, np.ascontiguousarray(indices))
        return _tokens([_first_highest(row) for row in _rows(scores, indices)])

    def local_maxima(self, scores: Tensor, first_id: int) -> Tensor:
        """Return the maximum of every row."""
        # torch finds the largest of bfloat16 numbers one by one.
        return super().local_maxima(scores.float(), first_id)

    def drawn_maxima(
        self, scores: Tensor, indices: IntArray, draws: Draws, first_id: int
    ) -> Tensor:
        if self._draw is None:
            return super().drawn_maxima(scores, indices, draws, first_id)
        if scores.dtype not in (torch.float32, torch.bfloat16) or scores.stride(1) != 1:
            scores = scores.float().contiguous()
        indices, keys = np.ascontiguousarray(indices), np.ascontiguousarray(draws.key)
        return self._draw(scores, indices, draws.scale, keys, first_id)

    def filtered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        limits = zip(
            *(draws.temperature.tolist(), draws.top_k.tolist()),
            *(draws.top_p.tolist(), draws.min_p.tolist()),
            strict=True,
        )
        scales, keys, token_ids = draws.scale.tolist(), draws.key.tolist(), []
        # A low temperature may turn a difference into -inf, as it should.
        with np.errstate(over="ignore"):
            for index, row in enumerate(_rows(scores, indices)):
                ids = _kept_ids(row, *next(limits))
                if self._draw is not None:
                    kept = ids.astype(np.uint32)
                    token_ids.append(self._draw.token(row[ids], kept, scales[index], keys[index]))
                    continue
                whole = torch.full((1, len(row)), -torch.inf)
                whole.numpy()[0, ids] = row[ids]
                draw = draws.of_rows(slice(index, index + 1))
                token_ids.append(int(self.unfiltered(whole, np.zeros(1, dtype=np.int64), draw)))
        return _tokens(token_ids)

    def top_tokens(self, scores: Tensor, num_tokens: int) -> Tensor:
        ids = np.empty((len(scores), num_tokens), dtype=np.int64)
        if num_tokens > 0:
            for row_ids, row in zip(ids, _rows(scores, np.arange(len(scores))), strict=True):
                floor = _kth_highest(row, num_tokens)
                # In a row with NaN fewer may reach the floor; its order has no meaning.
                found = _sorted_ids(row, np.flatnonzero(~(row < floor)))
                row_ids[:] = found[:num_tokens]
        return torch.from_numpy(ids)


def _tokens(token_ids: list[int]) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64)


def _rows(scores: Tensor, indices: IntArray) -> Iterator[Row]:
    """Yield the rows as contiguous float32; each is valid until the next."""
    if scores.dtype != torch.bfloat16:
        array = scores.numpy()
        for index in indices.tolist():
            yield np.ascontiguousarray(array[index], dtype=np.float32)
        return
    # NumPy has no bfloat16: it is the upper half of a float32.
    halves = scores.view(torch.int16).numpy().view(np.uint16)
    words = np.empty(scores.shape[1], dtype=np.uint32)
    for index in indices.tolist():
        words[:] = halves[index]
        np.left_shift(words, 16, out=words)
        yield words.view(np.float32)


def _first_highest(row: Row) -> int:
    # argmax finds a NaN before any number.
    token_id = int(row.argmax())
    return token_id if math.isfinite(row[token_id]) else -1


def _kept_ids(
    row: Row, temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.intp]:
    """Return the tokens that the filters keep; of a broken row, a token that breaks it."""
    highest = row.max()
    if not math.isfinite(highest):
        return np.array([row.argmax()])
    total = None
    if top_k == len(row) and min_p == 0.0:
        weights = _weigh(row, highest, temperature, out=np.empty_like(row))
        total = float(weights.sum())
        ids = _candidates(weights, total, top_p)
    else:
        floor = np.float32(-np.inf)
        if min_p > 0.0:
            bound = float(highest) + temperature * math.log(SLACK * min_p)
            floor = np.nextafter(np.float32(bound), floor)
        if top_k < len(row):
            floor = max(floor, _kth_highest(row, top_k))
        ids = np.flatnonzero(row >= floor)
    ids = _sorted_ids(row, ids)[:top_k]
    kept = np.exp((row[ids].astype(np.float64) - highest) / temperature)
    sums = kept[kept >= min_p].cumsum()
    if top_p < 1.0:
        limit = top_p * (float(sums[-1]) if total is None else total)
        sums = sums[: sums.searchsorted(limit) + 1]
    return ids[: len(sums)]


def _candidates(weights: Row, total: float, top_p: float) -> NDArray[np.intp]:
    """Return the ids of all tokens that top_p may keep, and not many more."""
    for floor in CANDIDATE_WEIGHTS:
        ids = np.flatnonzero(weights >= floor)
        # float32 sums of this length are accurate to about 1e-6.
        if (1.0 - 1e-4) * weights[ids].sum() >= top_p * total:
            return ids
    # All tokens up to this weight weigh less than the weight that top_p drops.
    return np.flatnonzero(weights >= SLACK * (1.0 - top_p) * total / len(weights))


def _weigh(row: Row, highest: np.float32, temperature: float, *, out: Row) -> Row:
    np.subtract(row, highest, out=out)
    if temperature != 1.0:
        np.divide(out, np.float32(temperature), out=out)
    return np.exp(out, out=out)


def _kth_highest(row: Row, k: int) -> np.float32:
    value: np.float32 = np.partition(row, len(row) - k)[len(row) - k]
    return value


def _sorted_ids(row: Row, ids: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the ids by descending score, ties by ascending id."""
    # A single integer sorts as (score, id): the bits of floats sort like the floats once the bits
    # of negative floats are inverted. Adding zero makes -0.0 and 0.0 equal.
    bits = (row[ids] + np.float32(0.0)).view(np.int32).astype(np.int64)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = (~bits << 32) | ids
    keys.sort()
    return keys & 0xFFFFFFFF
