"""Preemption costs little: throughput with a pool that is too small, in virtual time."""

import pytest

from bench.virtual_cases import throughput_of_pool


@pytest.mark.parametrize("has_limit", [True, False])
def test_a_pool_that_is_too_small_costs_little_throughput(has_limit: bool) -> None:
    # Without a limit each sequence may grow to a length of which the pool holds hardly one.
    fitting = throughput_of_pool(1.1, has_limit=has_limit)
    small = throughput_of_pool(0.9, has_limit=has_limit)
    assert small > 0.95 * fitting
