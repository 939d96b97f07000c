"""What the masks of a tenant take is that tenant's alone."""

from __future__ import annotations

import pytest

from cluster.structured.processes.tenant_accounts import TenantAccounts


class Clock:
    """A time that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def accounts(clock: Clock) -> TenantAccounts:
    accounts = TenantAccounts(clock)
    for sequence_id in range(256):
        accounts.add(sequence_id, "ann")
    accounts.add(256, "ben")
    return accounts


def test_a_long_run_of_a_large_batch_does_not_run_dry(accounts: TenantAccounts) -> None:
    for _ in range(1000):
        accounts.begin_step(range(256))
        for sequence_id in range(256):
            # The most that was measured, where all are near the end of a limited string.
            accounts.of(sequence_id).charge(0.0024)
            assert not accounts.of(sequence_id).is_empty


def test_what_was_not_taken_is_saved_up_to_a_limit(accounts: TenantAccounts) -> None:
    for _ in range(1000):
        accounts.begin_step([0])
    accounts.of(0).charge(0.501)
    assert not accounts.of(0).is_empty
    accounts.of(0).charge(0.003)
    assert accounts.of(0).is_empty


def test_a_tenant_pays_for_no_other(accounts: TenantAccounts) -> None:
    accounts.begin_step(range(257))
    accounts.of(0).charge(60.0)
    assert accounts.of(255).is_empty
    assert not accounts.of(256).is_empty


def test_nobody_gets_a_new_account_by_an_end(accounts: TenantAccounts, clock: Clock) -> None:
    accounts.begin_step([0])
    accounts.of(0).charge(60.0)
    accounts.forget(range(256))
    accounts.begin_step([256])
    accounts.add(257, "ann")
    accounts.begin_step([257])
    assert accounts.of(257).is_empty
    # It owes half a second, and gets a tenth of each.
    clock.now_s = 5.0
    accounts.begin_step([257])
    assert not accounts.of(257).is_empty


def test_an_account_that_time_has_filled_is_dropped(accounts: TenantAccounts, clock: Clock) -> None:
    accounts.begin_step([0, 256])
    accounts.forget(range(256))
    clock.now_s = 9.0
    accounts.begin_step([256])
    assert len(accounts) == 2
    clock.now_s = 10.0
    accounts.begin_step([256])
    assert len(accounts) == 1
