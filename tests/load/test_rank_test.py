"""The rank test against known values."""

from __future__ import annotations

import random

import pytest

from tests.load.rank_test import p_value


def test_samples_that_do_not_overlap_differ() -> None:
    # scipy.stats.mannwhitneyu(range(20), range(20, 40), method="asymptotic")
    assert p_value(range(20), range(20, 40)) == pytest.approx(6.795615128e-08)


def test_equal_members_share_their_ranks() -> None:
    assert p_value([1.0] * 20, [1.0] * 30) == 1.0
    assert p_value([1.0, 2.0] * 20, [2.0, 1.0] * 20) == pytest.approx(1.0)


def test_chance_alone_is_called_a_difference_as_often_as_it_should() -> None:
    chance = random.Random(0)
    found = [
        p_value([chance.random() for _ in range(40)], [chance.random() for _ in range(40)])
        for _ in range(400)
    ]
    assert 0.02 < sum(p < 0.05 for p in found) / len(found) < 0.08
