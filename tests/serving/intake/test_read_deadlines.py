"""Messages that do not arrive in time, with one timer for all calls."""

from __future__ import annotations

import asyncio

import pytest

from cluster.serving.intake import ReadDeadlines
from pagedray.errors import DeadlineError
from tests.virtual_time import in_virtual_time


async def end_of(deadlines: ReadDeadlines, *, arrives_in_s: float) -> tuple[str, float]:
    """Return how the wait for a message ends, and when."""
    try:
        result = await deadlines.wait_for(asyncio.sleep(arrives_in_s, "arrived"))
    except DeadlineError as error:
        result = str(error)
    return result, asyncio.get_running_loop().time()


@in_virtual_time
async def test_each_message_has_its_own_time() -> None:
    deadlines = ReadDeadlines(10.0)
    late = "The message did not arrive within 10 s (--read-timeout-s)."
    first = asyncio.create_task(end_of(deadlines, arrives_in_s=60.0))
    await asyncio.sleep(4.0)
    others = [
        asyncio.create_task(end_of(deadlines, arrives_in_s=seconds)) for seconds in (9.0, 60.0)
    ]
    assert await first == (late, 10.0)
    assert [await other for other in others] == [("arrived", 13.0), (late, 14.0)]
    # No timer is left; the next wait starts one.
    await asyncio.sleep(86.0)
    assert await end_of(deadlines, arrives_in_s=60.0) == (late, 110.0)


@in_virtual_time
async def test_a_cancelled_wait_is_not_taken_for_a_late_message() -> None:
    deadlines = ReadDeadlines(10.0)
    waiting = asyncio.create_task(end_of(deadlines, arrives_in_s=60.0))
    await asyncio.sleep(4.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
