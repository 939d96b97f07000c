"""Tenants take places in turn."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.serving.intake.tenant_turns import TenantTurns


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_tenant_that_used_the_least_time_comes_next() -> None:
    turns = TenantTurns(1, num_per_tenant=1)
    order: list[str] = []

    async def use(tenant: str, seconds: float) -> None:
        await turns.wait_turn(tenant)
        order.append(tenant)
        await asyncio.sleep(0)
        turns.end_turn(tenant, seconds)

    uses = [use("ann", 5.0) for _ in range(3)] + [use("ben", 1.0) for _ in range(4)]
    await asyncio.gather(*uses)
    assert order == ["ann", "ben", "ben", "ben", "ben", "ann", "ann"]


async def test_a_cancelled_call_keeps_no_place() -> None:
    turns = TenantTurns(1, num_per_tenant=1)
    await turns.wait_turn("ann")
    waiting = [asyncio.create_task(turns.wait_turn(tenant)) for tenant in ("ann", "ben", "eve")]
    await settle()
    waiting[0].cancel()
    waiting[1].cancel()
    # Ben is given his place while he leaves.
    turns.end_turn("ann", 0.0)
    await settle()
    assert [one.done() for one in waiting] == [True, True, True]
    assert not waiting[2].cancelled()
    turns.end_turn("eve", 0.0)
    assert turns.num_tenants == 0


async def test_a_call_that_leaves_late_takes_no_other_place() -> None:
    turns = TenantTurns(1, num_per_tenant=1)
    await turns.wait_turn("ben")
    leaving = asyncio.create_task(turns.wait_turn("ann"))
    await settle()
    leaving.cancel()
    turns.end_turn("ben", 0.0)
    # Before Ann's first call has left, her second has its turn and ends, and her third has one.
    take_turn(turns, "ann")
    turns.end_turn("ann", 0.0)
    take_turn(turns, "ann")
    await settle()
    assert turns.num_tenants == 1
    turns.end_turn("ann", 0.0)
    take_turn(turns, "ben")


def take_turn(turns: TenantTurns, tenant: str) -> None:
    """Take a free place at once."""
    with pytest.raises(StopIteration):
        turns.wait_turn(tenant).send(None)


async def test_places_are_never_lost_nor_given_twice() -> None:
    turns = TenantTurns(3, num_per_tenant=2)
    chance = random.Random(0)
    running: list[str] = []

    async def use(tenant: str) -> None:
        await turns.wait_turn(tenant)
        try:
            running.append(tenant)
            assert len(running) <= 3
            assert running.count(tenant) <= 2
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        finally:
            running.remove(tenant)
            turns.end_turn(tenant, chance.random())

    tasks = [asyncio.create_task(use(chance.choice("abcd"))) for _ in range(400)]
    while not all(task.done() for task in tasks):
        chance.choice(tasks).cancel()
        await asyncio.sleep(0)
    assert turns.num_tenants == 0
    assert not any(task.exception() for task in tasks if not task.cancelled())
