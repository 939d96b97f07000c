"""Bytes that are being received are bounded, of each tenant and in total."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.serving.buffers import BufferLimits
from cluster.serving.intake import Reception
from pagedray.errors import OverloadedError
from tests.virtual_time import in_virtual_time


@pytest.fixture
def reception() -> Reception:
    """400 bytes for all tenants, 100 for each."""
    return Reception(BufferLimits(400), wait_s=1.0, note_freed=ignore)


def ignore(_: int) -> None:
    """Do nothing with bytes that are freed."""


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_tenant_may_not_exceed_its_quarter(reception: Reception) -> None:
    with reception.open_message("ann") as first, reception.open_message("ann") as second:
        first.add(60)
        with pytest.raises(OverloadedError, match=r"this API key's tenant.* 100 bytes"):
            second.add(41)
        second.add(40)
        assert reception.num_bytes == 100
        with reception.open_message("ben") as other:
            other.add(100)
    assert reception.num_bytes == 0


def test_bytes_are_freed_when_a_message_is_parsed() -> None:
    freed: list[int] = []
    reception = Reception(BufferLimits(400), wait_s=0.05, note_freed=freed.append)
    with reception.open_message("ann") as message:
        message.add(100)
        message.shrink_to(60)
        assert freed == []
    assert freed == [60]


def test_all_tenants_together_may_not_exceed_the_total(reception: Reception) -> None:
    messages = [reception.open_message(name) for name in "abcd"]
    for message in messages:
        message.add(100)
    late = reception.open_message("e")
    with pytest.raises(OverloadedError, match="400 bytes together"):
        late.add(1)
    messages[0].shrink_to(99)
    late.add(1)


@in_virtual_time
async def test_a_message_waits_until_those_before_it_have_arrived(reception: Reception) -> None:
    first, second, third = (reception.open_message("ann") for _ in range(3))
    await first.wait_room(80)
    waiting = [asyncio.create_task(one.wait_room(80)) for one in (second, third)]
    await settle()
    assert not any(one.done() for one in waiting)
    first.shrink_to(0)
    await settle()
    assert [one.done() for one in waiting] == [True, False]
    second.shrink_to(20)
    await waiting[1]
    assert reception.num_bytes == 100


@in_virtual_time
async def test_a_message_that_waits_long_is_rejected(reception: Reception) -> None:
    with reception.open_message("ann") as first, reception.open_message("ann") as second:
        await first.wait_room(80)
        with pytest.raises(OverloadedError, match="receive-buffer-mib"):
            await second.wait_room(80)
        await reception.open_message("ben").wait_room(80)


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["rejected", "left"])
@in_virtual_time
async def test_a_message_does_not_wait_for_one_that_has_left(is_cancelled: bool) -> None:
    reception = Reception(
        BufferLimits(400), wait_s=60.0 if is_cancelled else 1.0, note_freed=ignore
    )
    with reception.open_message("ann") as first:
        await first.wait_room(80)
        large = asyncio.create_task(reception.open_message("ann").wait_room(90))
        await asyncio.sleep(0.5)
        small = asyncio.create_task(reception.open_message("ann").wait_room(10))
        await settle()
        assert not small.done()
        if is_cancelled:
            large.cancel()
        await asyncio.wait((large,))
        await settle()
        assert small.done()
        assert small.exception() is None
        assert reception.num_bytes == 90


async def test_counts_stay_exact_when_messages_are_cancelled() -> None:
    reception = Reception(BufferLimits(400), wait_s=60.0, note_freed=ignore)
    chance = random.Random(0)

    async def receive(tenant: str) -> None:
        with reception.open_message(tenant) as message:
            await message.wait_room(chance.choice((10, 40, 90)))
            assert reception.num_bytes <= 400
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            message.shrink_to(chance.randrange(10))
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(receive(chance.choice("abcde"))) for _ in range(300)]
    while not all(task.done() for task in tasks):
        chance.choice(tasks).cancel()
        await asyncio.sleep(0)
    assert reception.num_bytes == 0
    assert not any(task.exception() for task in tasks if not task.cancelled())
