"""The CPU time that each tenant's long texts may take."""

from __future__ import annotations

from cluster.serving.text.text_budgets import TextBudgets
from tests.clock import Clock


def test_a_tenant_that_took_more_than_its_budget_recovers_in_seconds() -> None:
    clock = Clock()
    budgets = TextBudgets(clock)
    budgets.charge("ann", 0.09)
    assert not budgets.is_spent("ann")
    budgets.charge("ann", 60.0)
    assert budgets.is_spent("ann")
    assert not budgets.is_spent("ben")
    clock.now_s = 4.0
    assert budgets.is_spent("ann")
    clock.now_s = 6.0
    assert not budgets.is_spent("ann")


def test_full_budgets_are_not_kept() -> None:
    clock = Clock()
    budgets = TextBudgets(clock)
    for tenant in range(100):
        clock.now_s += 1.0
        budgets.charge(str(tenant), 0.01)
    assert len(budgets) == 1
