"""Pacing of streams over a transport with a limited message rate."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from cluster.serving.ray_serve.options import MessagePace

if TYPE_CHECKING:
    from starlette.types import Message

PART = {"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}
HEAD = {"type": "http.response.start", "status": 200, "headers": []}


def test_streams_that_have_started_share_the_message_rate() -> None:
    pace = MessagePace(800.0)
    with pace.stream() as first, pace.stream():
        assert pace.pause_s(first) == pace.pause_s(first) == 1 / 800
        with ExitStack() as stack:
            for _ in range(63):
                last = stack.enter_context(pace.stream())
                pace.pause_s(last)
            assert pace.pause_s(first) == 64 / 800
        assert pace.pause_s(first) == 1 / 800


@pytest.mark.asyncio
async def test_a_part_is_sent_at_once_and_its_stream_waits() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    # One message per thousand seconds.
    with MessagePace(1e-3).stream() as stream:
        paced = stream.paced(send)
        await asyncio.wait_for(paced(HEAD), 60)
        waiting = asyncio.ensure_future(paced(PART))
        await asyncio.sleep(0.01)
        assert sent == [HEAD, PART]
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait_for(paced(END), 60)
        assert sent[-1] == END
