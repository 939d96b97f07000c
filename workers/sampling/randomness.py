"""The random number of a token: a pure function of (seed, index, position).

The numbers of a sequence are the outputs of a SplitMix64 generator (Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the finalizer "Mix13" of
D. Stafford). Its k-th output is the finalizer of `start + k * gamma`, hence a generator that can
be entered at any position. Where a sequence's generator starts is itself such a hash, of seed
and index. Everything is known on the host, so no device takes part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workers.sampling.arrays import FloatArray, IntArray

__all__ = ["finalize", "generator_start", "uniforms"]

GAMMA = 0x9E3779B97F4A7C15


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
