"""Requests that killed their ranks are not run a second time."""

from __future__ import annotations

import pytest

from cluster.engine.crash_search import CrashingRequests
from pagedray.errors import LethalRequestError, OverloadedError


def test_an_equal_request_is_rejected_for_ten_minutes() -> None:
    lethal = CrashingRequests()
    assert not lethal
    lethal.note_request("poison", "", 100.0)
    lethal.check("honest", "", 101.0)
    for tenant in ("", "other"):
        with pytest.raises(LethalRequestError):
            lethal.check("poison", tenant, 699.0)
    lethal.check("poison", "", 701.0)
    assert not lethal


def test_tenant_with_many_waits_until_the_first_is_old() -> None:
    lethal = CrashingRequests()
    for number in range(3):
        lethal.check("honest", "bad", float(number))
        lethal.note_request(number, "bad", float(number))
    with pytest.raises(OverloadedError) as caught:
        lethal.check("honest", "bad", 100.0)
    assert caught.value.retry_after_s == 500.0
    lethal.check("honest", "good", 100.0)
    lethal.check("honest", "bad", 601.0)


def test_clients_without_keys_are_not_rejected_for_one_another() -> None:
    lethal = CrashingRequests()
    for number in range(20):
        lethal.note_request(number, "", 0.0)
    lethal.check("honest", "", 1.0)


def test_only_some_are_kept() -> None:
    lethal = CrashingRequests()
    for number in range(1000):
        lethal.note_request(number, "", 0.0)
    lethal.check(0, "", 1.0)
    with pytest.raises(LethalRequestError):
        lethal.check(999, "", 1.0)
