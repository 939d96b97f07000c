"""Preemption costs little: throughput with a pool that is too small, in virtual time."""

import pytest

from bench.scheduler.cases import (
    WORKLOADS,
    Workload,
    throughput_of_pool,
    throughput_of_preemption,
)

SLOW: tuple[Workload, ...] = ("shared prefix", "long prompts")


@pytest.mark.parametrize("has_limit", [True, False])
def test_a_pool_that_is_too_small_costs_little_throughput(has_limit: bool) -> None:
    # Without a limit each sequence may grow to a length of which the pool holds hardly one.
    fitting = throughput_of_pool(1.1, has_limit=has_limit)
    small = throughput_of_pool(0.9, has_limit=has_limit)
    assert small > 0.95 * fitting


@pytest.mark.parametrize(
    "workload",
    [pytest.param(one, marks=[pytest.mark.slow] if one in SLOW else []) for one in WORKLOADS],
)
def test_auto_is_as_good_as_the_better_of_swapping_and_recomputing(workload: Workload) -> None:
    swapped, recomputed, chosen = (
        throughput_of_preemption(workload, preemption)
        for preemption in ("swap", "recompute", "auto")
    )
    assert chosen > 0.95 * max(swapped, recomputed)
