"""Random numbers of seeds, indices and positions."""

from __future__ import annotations

import numpy as np

from tests.workers.sampling.sampler_rig import assert_fits
from workers.sampler import finalize, generator_start, uniforms

PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423]
"""The first outputs of SplitMix64 that starts at 1234567."""


def test_finalizer_gives_the_published_outputs_of_splitmix64() -> None:
    gamma = 0x9E3779B97F4A7C15
    words = np.array([(1234567 + k * gamma) % 2**64 for k in (1, 2, 3)], dtype=np.uint64)
    assert finalize(words).tolist() == PUBLISHED


def test_uniforms_are_the_published_outputs_by_position() -> None:
    starts = np.full(3, 1234567, dtype=np.uint64)
    numbers = uniforms(starts, np.array([3, 1, 2]))
    expected = [PUBLISHED[place] for place in (2, 0, 1)]
    # The first 53 of 64 bits.
    assert numbers.tolist() == [(word >> 11) / 2**53 for word in expected]


def test_uniforms_are_even_and_below_one() -> None:
    starts = np.full(100_000, generator_start(1, 0), dtype=np.uint64)
    numbers = uniforms(starts, np.arange(100_000))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert_fits((numbers * 50).astype(int).tolist(), np.full(50, 1 / 50))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_neighboring_seeds_indices_and_positions_are_independent() -> None:
    for starts in (
        [generator_start(seed, 0) for seed in range(-10_000, 10_000)],
        [generator_start(5, index) for index in range(20_000)],
    ):
        numbers = uniforms(np.array(starts, dtype=np.uint64), np.zeros(20_000, dtype=np.int64))
        assert len(set(numbers.tolist())) == 20_000
        assert_fits((numbers * 50).astype(int).tolist(), np.full(50, 1 / 50))
