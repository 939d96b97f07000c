"""Timers of connections."""

from __future__ import annotations

import asyncio

from cluster.serving.connections.timer import Timer
from tests.virtual_time import in_virtual_time


@in_virtual_time
async def test_running_timer_is_not_started_again() -> None:
    loop = asyncio.get_running_loop()
    ended_s: list[float] = []
    timer = Timer(loop)
    for delay_s in (3.0, 1.0):
        timer.start(delay_s, lambda: ended_s.append(loop.time()))
    assert timer.is_running
    await asyncio.sleep(5.0)
    assert ended_s == [3.0]
    assert not timer.is_running


@in_virtual_time
async def test_timer_starts_again_after_its_end_and_its_stop() -> None:
    loop = asyncio.get_running_loop()
    ended_s: list[float] = []
    timer = Timer(loop)
    timer.start(1.0, lambda: ended_s.append(loop.time()))
    await asyncio.sleep(2.0)
    timer.start(1.0, lambda: ended_s.append(loop.time()))
    timer.stop()
    timer.start(2.0, lambda: ended_s.append(loop.time()))
    await asyncio.sleep(5.0)
    assert ended_s == [1.0, 4.0]
