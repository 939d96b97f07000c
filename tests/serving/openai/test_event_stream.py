"""Streams of events, as the connection gets them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.serving.openai.event_stream import EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Message


async def test_large_events_are_sent_in_pieces_that_their_client_has_read() -> None:
    parts = (b"data: ", b"x" * 300_000, b"y" * 200_000, b"\n\n")
    sent: list[bytes] = []
    num_unread = most_unread = 0

    async def events() -> AsyncGenerator[bytes | tuple[bytes, ...]]:
        yield parts
        yield b"data: [DONE]\n\n"

    async def send(message: Message) -> None:
        nonlocal num_unread, most_unread
        body = message.get("body", b"")
        num_unread += len(body)
        most_unread = max(most_unread, num_unread)
        # The client reads all of it.
        await asyncio.sleep(0)
        num_unread -= len(body)
        sent.append(body)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    await EventStream("r", events(), close=lambda: None)({}, receive, send)
    assert b"".join(sent) == b"".join(parts) + b"data: [DONE]\n\n"
    assert most_unread <= 2**17
