"""The Mann-Whitney U test against known values."""

from __future__ import annotations

import random

import pytest

from tests.load.mann_whitney import p_value


def test_samples_that_do_not_overlap_differ() -> None:
    # scipy.stats.mannwhitneyu(range(20), range(20, 40), method="asymptotic")
    assert p_value(range(20), range(20, 40)) == pytest.approx(6.795615128e-08)


def test_equal_values_are_ties() -> None:
    assert p_value([1.0] * 20, [1.0] * 30) == 1.0
    assert p_value([1.0, 2.0] * 20, [2.0, 1.0] * 20) == pytest.approx(1.0)


def test_false_positives_are_as_frequent_as_the_p_value_says() -> None:
    generator = random.Random(0)
    found = [
        p_value([generator.random() for _ in range(40)], [generator.random() for _ in range(40)])
        for _ in range(400)
    ]
    assert 0.02 < sum(p < 0.05 for p in found) / len(found) < 0.08
