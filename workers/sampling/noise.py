"""The random numbers of draws: standard Gumbel noise for every token of the vocabulary.

A sequence has a generator, whose *key* at a position is 64 random bits: a pure function of seed,
index and position (SplitMix64, Steele et al., 2014). The noise of a token is a pure function of the
key and the token id:

1. A hash of integers, which multiplies twice, makes 31 bits of them.
2. Of the bits w, v = (w + 1/2) / 2**31 is uniform in (0, 1), and -log(-log(1 - v)) is the noise,
   between -3.1 and 22.2, with a relative error of the logarithms below 1e-6.

The logarithms are polynomials in float32. Every operation is rounded by itself: no product and sum
are fused, and none are reordered. So `noise`, the kernel in C (`attention.kernels.cpu.draw`) and
the Triton kernels return the same bits on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["finalize", "generator_start", "gumbel", "noise", "noise_keys"]

_GAMMA = 0x9E3779B97F4A7C15
_WORD = 0xFFFFFFFF
_LOG_2 = 0.6931471805599453
_COEFFICIENTS = (
    0.14094771444797516,
    -0.17339035868644714,
    0.20101404190063477,
    -0.24979183077812195,
    0.33330535888671875,
    -0.500001847743988,
)
"""Of (log(1 + x) - x) / x**2 for x in [-1/4, 1/2], the highest power but one first."""
_HIGHEST_COEFFICIENT = -0.06638092547655106
_THREE_QUARTERS = 0x3F400000
"""The bits of 0.75."""


def generator_start(seed: int, index: int) -> int:
    """Return where the generator of a request's `index`-th sequence starts, in [0, 2**64)."""
    words = np.array([seed % 2**64], dtype=np.uint64)
    words = finalize(words + np.uint64(_GAMMA)) ^ np.uint64(index)
    return int(finalize(words + np.uint64(_GAMMA))[0])


def noise_keys(starts: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the key at each position of its generator, 64 bits."""
    return finalize(starts + positions.astype(np.uint64) * np.uint64(_GAMMA)).view(np.int64)


def finalize(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the words, each mixed so that every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Return the noise of these tokens at int64 keys, float32 `[num_keys, num_ids]`."""
    return gumbel(_hash(keys.unsqueeze(1), ids) >> 1)


def gumbel(words: Tensor) -> Tensor:
    """Return the noise of 31 bits each, int64, as float32."""
    below = ((0x7FFFFFFF - words).float() + 0.5) * 2.0**-31
    exponents, parts = _split(below)
    # Near 1, float32 has too few bits for 1 - v.
    parts = torch.where(words < 1 << 29, (words.float() + 0.5) * -(2.0**-31), parts)
    return -_log(*_split(-_log(exponents, parts)))


def _hash(keys: Tensor, ids: Tensor) -> Tensor:
    """Return 32 random bits for each key and id, int64."""
    words = (ids * 0x9E3779B9 + (keys & _WORD)) & _WORD
    words = ((words ^ (words >> 16)) * 0x21F0AAAD) & _WORD
    words = words ^ (words >> 15) ^ ((keys >> 32) & _WORD)
    words = (words * 0xD35A2D97) & _WORD
    return words ^ (words >> 15)


def _split(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return e and x of numbers (1 + x) * 2**e, with x in [-1/4, 1/2)."""
    bits = numbers.view(torch.int32)
    exponents = (bits - _THREE_QUARTERS) >> 23
    return exponents.float(), (bits - (exponents << 23)).view(torch.float32) - 1.0


def _log(exponents: Tensor, parts: Tensor) -> Tensor:
    """Return log((1 + part) * 2**exponent)."""
    sums = torch.full_like(parts, _HIGHEST_COEFFICIENT)
    for coefficient in _COEFFICIENTS:
        sums = sums * parts + coefficient
    return (parts * parts) * sums + parts + exponents * _LOG_2
