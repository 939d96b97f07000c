"""When a write counts as stalled; `tests/serving/test_stalled_readers.py` has real clients."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.serving.rpc.methods import StalledWrites
from pagedray.errors import StalledReaderError

TIMEOUT_S = 0.2


async def write(writes: StalledWrites, accepted: asyncio.Event) -> None:
    """Write a message that the client accepts later."""
    with writes.watched() as writer:
        writer.num_marks += 1
        await accepted.wait()
        writer.num_marks += 1


async def test_a_write_that_is_not_accepted_ends_its_call() -> None:
    with pytest.raises(StalledReaderError):
        await asyncio.wait_for(write(StalledWrites(TIMEOUT_S), asyncio.Event()), 60.0)


async def test_a_pause_of_the_process_during_a_write_is_no_stall() -> None:
    accepted = asyncio.Event()
    writing = asyncio.create_task(write(StalledWrites(TIMEOUT_S), accepted))
    # The write is seen before the pause.
    await asyncio.sleep(TIMEOUT_S / 4)
    time.sleep(5 * TIMEOUT_S)
    for _ in range(3):
        await asyncio.sleep(0)
    accepted.set()
    await writing
