"""What a carrier of few messages is handed, and when."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cluster.serving.serve_pace import Pace

if TYPE_CHECKING:
    from starlette.types import Message

PART = {"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}
HEAD = {"type": "http.response.start", "status": 200, "headers": []}


def test_streams_share_the_messages_of_a_second() -> None:
    pace = Pace(800.0)
    assert pace.pause_s(1) == 1 / 800
    assert pace.pause_s(64) == 64 / 800
    assert pace.pause_s(0) == pace.pause_s(1)


@pytest.mark.asyncio
async def test_a_part_is_sent_at_once_and_its_stream_waits() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    # A message each thousand seconds.
    paced = Pace(1e-3).paced(send, lambda: 1)
    await asyncio.wait_for(paced(HEAD), 5)
    waiting = asyncio.ensure_future(paced(PART))
    await asyncio.sleep(0.01)
    assert sent == [HEAD, PART]
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait_for(paced(END), 5)
    assert sent[-1] == END


@pytest.mark.asyncio
async def test_the_wait_goes_by_the_streams_that_run_then() -> None:
    num_streams = 1_000_000

    async def send(message: Message) -> None:
        nonlocal num_streams
        num_streams = 1

    await asyncio.wait_for(Pace(1000.0).paced(send, lambda: num_streams)(PART), 5)
