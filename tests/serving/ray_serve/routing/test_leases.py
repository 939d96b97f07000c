"""Calls of a replica end when their leases expire."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cluster.serving.ray_serve.served_replica import Leases
from tests.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable

# Half of the lease passes without a renewal.
LEASE_S = 0.4


def timed_leases() -> Leases:
    """Return leases on the clock of the event loop."""
    return Leases(LEASE_S, clock=asyncio.get_running_loop().time)


async def run(leases: Leases, call_id: str | None) -> None:
    with leases.held(call_id):
        await asyncio.sleep(3600.0)


async def after(duration_s: float, every_step: Callable[[], None] = lambda: None) -> None:
    for _ in range(10):
        every_step()
        await asyncio.sleep(duration_s / 10)


@in_virtual_time
async def test_a_call_ends_when_its_lease_expires() -> None:
    leases = timed_leases()
    kept, lost = (asyncio.create_task(run(leases, name)) for name in ("kept", "lost"))
    await after(1.5 * LEASE_S, lambda: leases.renew({"kept"}))
    assert lost.cancelled()
    assert not kept.done()
    # The renewing process is gone.
    await after(1.5 * LEASE_S)
    assert kept.cancelled()


@in_virtual_time
async def test_calls_of_one_id_are_renewed_together() -> None:
    leases = timed_leases()
    calls = [asyncio.create_task(run(leases, "same")) for _ in range(2)]
    await after(1.5 * LEASE_S, lambda: leases.renew({"same"}))
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()


@in_virtual_time
async def test_calls_continue_if_no_lease_was_ever_renewed() -> None:
    leases = timed_leases()
    call = asyncio.create_task(run(leases, "old"))
    await after(1.5 * LEASE_S)
    assert not call.done()
    call.cancel()


@in_virtual_time
async def test_a_call_that_has_ended_is_left_alone() -> None:
    leases = timed_leases()
    leases.renew(())
    with leases.held("short"):
        await asyncio.sleep(0)
    # The task outlives its call and must not be cancelled.
    await after(1.5 * LEASE_S)


@in_virtual_time
async def test_a_call_begins_with_a_whole_lease() -> None:
    leases = timed_leases()
    leases.renew(())
    first = asyncio.create_task(run(leases, "first"))
    await after(0.4 * LEASE_S)
    second = asyncio.create_task(run(leases, "second"))
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not second.done()
    with pytest.raises(asyncio.CancelledError):
        await second


@in_virtual_time
async def test_a_task_without_an_id_has_no_lease() -> None:
    leases = timed_leases()
    leases.renew(())
    life = asyncio.create_task(run(leases, None))
    await after(1.5 * LEASE_S)
    assert not life.done()
    life.cancel()
