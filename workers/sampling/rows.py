"""The sampling parameters of the rows of the batch, as arrays on the host."""

from __future__ import annotations

from enum import IntFlag
from typing import TYPE_CHECKING

import numpy as np

from workers.sampling.choice import Draws

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagedray.batch import SequenceStart
    from workers.sampling.arrays import FloatArray, IntArray

__all__ = [
    "Need",
    "SamplingRows",
    "finalize",
    "generator_start",
    "uniforms",
]

# At this temperature any difference of float32 logits gives the lower one probability 0.
LOWEST_TEMPERATURE = 1e-20
_NO_POSITION = np.iinfo(np.int64).max
GAMMA = 0x9E3779B97F4A7C15


class Need(IntFlag):
    """Needs of a row beyond its most likely token."""

    RANDOM = 1
    FILTER = 2
    EDIT = 4
    PENALTY = 8
    LOGPROBS = 16
    MASK = 32
    BAD_WORDS = 64


class SamplingRows:
    """The sampling parameters of every row.

    `rows` and `positions` are int64 `[num_rows]` on the host, and so are results.
    """

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._needs = np.zeros(max_num_rows, dtype=np.int64)
        self._generator_starts = np.zeros(max_num_rows, dtype=np.uint64)
        self._temperature = np.ones(max_num_rows)
        self._top_k = np.zeros(max_num_rows, dtype=np.int64)
        self._top_p = np.ones(max_num_rows)
        self._min_p = np.zeros(max_num_rows)
        self._mask_positions = np.full(max_num_rows, _NO_POSITION)
        """The position from which each row samples under masks."""
        self._num_logprobs = np.zeros(max_num_rows, dtype=np.int64)
        self._reported_ids: dict[int, IntArray] = {}
        """The tokens that rows report in place of the most likely tokens."""

    def start(self, start: SequenceStart) -> None:
        """Replace all that is known of the row."""
        row, sampling = start.row, start.sampling
        self._needs[row] = self._needs_of(start)
        self._generator_starts[row] = generator_start(start.seed, start.index)
        self._temperature[row] = max(sampling.temperature, LOWEST_TEMPERATURE)
        top_k = sampling.top_k if sampling.top_k > 0 else self._vocab_size
        self._top_k[row] = min(top_k, self._vocab_size)
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._mask_positions[row] = (
            _NO_POSITION if start.mask_start is None else start.num_prompt_tokens + start.mask_start
        )
        self._num_logprobs[row] = sampling.logprobs or 0
        self._reported_ids.pop(row, None)
        if sampling.logprob_token_ids:
            distinct = dict.fromkeys(sampling.logprob_token_ids)
            self._reported_ids[row] = np.array(list(distinct), dtype=np.int64)
            self._num_logprobs[row] = len(distinct)

    def release(self, rows: IntArray) -> None:
        """Let these rows sample without masks."""
        self._mask_positions[rows] = _NO_POSITION

    def needs(self, rows: IntArray) -> IntArray:
        """Return the `Need` flags of these rows, without that of masks."""
        return self._needs[rows]

    def needs_at(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the `Need` flags of these rows at these positions."""
        needs = self._needs[rows]
        is_masked = positions >= self._mask_positions[rows]
        if is_masked.any():
            needs[is_masked] |= Need.MASK
        return needs

    def num_logprobs(self, rows: IntArray) -> IntArray:
        """Return how many tokens these rows report, in addition to the sampled tokens."""
        return np.minimum(self._num_logprobs[rows], self._vocab_size)

    def reported_ids(self, rows: IntArray) -> IntArray:
        """Return the tokens that these rows report in place of the most likely tokens.

        `[num_rows, most tokens of a row]`; -1 where a row reports its most likely tokens, or less.
        """
        if not self._reported_ids:
            return np.empty((len(rows), 0), dtype=np.int64)
        given = [self._reported_ids.get(row) for row in rows.tolist()]
        width = max((len(ids) for ids in given if ids is not None), default=0)
        found = np.full((len(rows), width), -1)
        for ids, one in zip(given, found, strict=True):
            if ids is not None:
                one[: len(ids)] = ids
        return found

    def draws(self, rows: IntArray, positions: IntArray) -> Draws:
        """Return how the tokens at these positions of these rows are drawn."""
        return Draws(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            uniform=self._uniforms(rows, positions),
        )

    def _uniforms(self, rows: IntArray, positions: IntArray) -> FloatArray:
        return uniforms(self._generator_starts[rows], positions)

    def _needs_of(self, start: SequenceStart) -> Need:
        sampling, need = start.sampling, Need(0)
        if not sampling.is_greedy:
            need |= Need.RANDOM
            is_cut_off = 0 < sampling.top_k < self._vocab_size
            if is_cut_off or sampling.top_p < 1.0 or sampling.min_p > 0.0:
                need |= Need.FILTER
        if sampling.logit_bias or sampling.allowed_token_ids or sampling.min_tokens > 0:
            need |= Need.EDIT
        if sampling.has_penalty:
            need |= Need.PENALTY
        if sampling.logprobs is not None:
            need |= Need.LOGPROBS
        if start.bad_token_ids:
            need |= Need.BAD_WORDS
        return need


def generator_start(seed: int, index: int) -> int:
    """Return where the generator of a request's `index`-th sequence starts, in [0, 2**64)."""
    words = np.array([seed % 2**64], dtype=np.uint64)
    words = finalize(words + np.uint64(GAMMA)) ^ np.uint64(index)
    return int(finalize(words + np.uint64(GAMMA))[0])


def uniforms(starts: NDArray[np.uint64], positions: IntArray) -> FloatArray:
    """Return a number in [0, 1) of 53 random bits for each position of its generator."""
    words = finalize(starts + positions.astype(np.uint64) * np.uint64(GAMMA))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def finalize(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the words, each mixed so that every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
