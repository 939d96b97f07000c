"""The masks of a tenant take CPU time from that tenant alone."""

from __future__ import annotations

import pytest

from cluster.structured.processes.cpu_budgets import TenantCpuBudgets
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budgets(clock: Clock) -> TenantCpuBudgets:
    budgets = TenantCpuBudgets(clock)
    for sequence_id in range(256):
        budgets.add_sequence(sequence_id, "ann")
    budgets.add_sequence(256, "ben")
    return budgets


def test_a_large_batch_never_exhausts_its_budget(budgets: TenantCpuBudgets) -> None:
    for _ in range(1000):
        budgets.begin_step(range(256))
        for sequence_id in range(256):
            # The largest measured, where all are near the end of a limited string.
            budgets.budget_of(sequence_id).charge(0.0024)
            assert not budgets.budget_of(sequence_id).is_exhausted


def test_unused_time_is_saved_up_to_a_limit(budgets: TenantCpuBudgets) -> None:
    for _ in range(1000):
        budgets.begin_step([0])
    budgets.budget_of(0).charge(0.501)
    assert not budgets.budget_of(0).is_exhausted
    budgets.budget_of(0).charge(0.003)
    assert budgets.budget_of(0).is_exhausted


def test_a_tenant_is_charged_for_its_own_sequences_only(budgets: TenantCpuBudgets) -> None:
    budgets.begin_step(range(257))
    budgets.budget_of(0).charge(60.0)
    assert budgets.budget_of(255).is_exhausted
    assert not budgets.budget_of(256).is_exhausted


def test_a_tenant_that_ends_its_sequences_keeps_its_debt(
    budgets: TenantCpuBudgets, clock: Clock
) -> None:
    budgets.begin_step([0])
    budgets.budget_of(0).charge(60.0)
    budgets.remove_sequences(range(256))
    budgets.begin_step([256])
    budgets.add_sequence(257, "ann")
    budgets.begin_step([257])
    assert budgets.budget_of(257).is_exhausted
    # It owes half a second, and recovers a tenth of each second.
    clock.now_s = 5.0
    budgets.begin_step([257])
    assert not budgets.budget_of(257).is_exhausted


def test_a_budget_that_has_recovered_is_dropped(budgets: TenantCpuBudgets, clock: Clock) -> None:
    budgets.begin_step([0, 256])
    budgets.remove_sequences(range(256))
    clock.now_s = 9.0
    budgets.begin_step([256])
    assert len(budgets) == 2
    clock.now_s = 10.0
    budgets.begin_step([256])
    assert len(budgets) == 1


def test_budgets_may_be_added_while_recovered_ones_are_dropped() -> None:
    others = iter(range(1, 10))

    class Moment(float):
        """A time at whose subtraction another thread makes a late mask."""

        def __sub__(self, other: float) -> float:
            shared.budget_of(next(others))
            return float(self) - other

    shared = TenantCpuBudgets(lambda: Moment(20.0))
    for sequence_id in range(10):
        shared.add_sequence(sequence_id, f"tenant-{sequence_id}")
    shared.begin_step([0])
    # One is added during the refill of the first one, and two while both are checked.
    assert len(shared) == 4
