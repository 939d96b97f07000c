"""Streams of events, as the connection gets them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster.serving.continuation import PROGRESS_KEY
from cluster.serving.openai.event_stream import EventStream
from tests.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Message

    from cluster.serving.continuation import Encoded


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


async def _passes_of(events: list[bytes | tuple[bytes, ...]]) -> list[int]:
    """Return the pass of the event loop in which each body is sent, the first being 0."""
    num_passes = 0
    passes: list[int] = []

    async def count() -> None:
        nonlocal num_passes
        while True:
            await asyncio.sleep(0)
            num_passes += 1

    async def given() -> AsyncGenerator[bytes | tuple[bytes, ...]]:
        for event in events:
            yield event

    async def send(message: Message) -> None:
        if message.get("body"):
            passes.append(num_passes)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    counting = asyncio.create_task(count())
    await EventStream("r", given(), close=lambda: None)({}, receive, send)
    counting.cancel()
    return [one - passes[0] for one in passes]


async def test_other_tasks_run_between_the_pieces_of_a_large_event() -> None:
    passes = await _passes_of([(b"x" * 200_000,), b"y"])
    assert len(passes) == 5
    assert passes[:4] == sorted(set(passes[:4]))
    # Nothing waits behind the last piece.
    assert passes[4] == passes[3]


async def test_nothing_waits_behind_small_events() -> None:
    assert await _passes_of([b"a", (b"b", b"c"), b"d", (b"e" * 2**16,), b"f"]) == [0] * 5


@in_virtual_time
async def test_a_client_hears_while_events_take_long() -> None:
    sent = await _sent(first_s=40.0, second_s=33.0)
    assert [body for body, _ in sent] == [*[b"ping"] * 2, b"a", *[b"ping"] * 2, b"b", b""]
    assert [progress and progress[0] for _, progress in sent] == [1, 2, 3, 4, 5, 6, None]


@in_virtual_time
async def test_events_in_time_come_alone() -> None:
    sent = await _sent(first_s=14.0, second_s=14.0)
    assert [body for body, _ in sent] == [b"a", b"b", b""]


async def _sent(*, first_s: float, second_s: float) -> list[tuple[bytes, Encoded | None]]:
    """Return the bodies and the progress that a stream sends, whose events take so long."""
    sent: list[tuple[bytes, Encoded | None]] = []
    num_taken = 0

    async def events() -> AsyncGenerator[bytes]:
        await asyncio.sleep(first_s)
        yield b"a"
        await asyncio.sleep(second_s)
        yield b"b"

    async def send(message: Message) -> None:
        # A client that reads slowly gets one after the other.
        await asyncio.sleep(1.0)
        if "body" in message:
            sent.append((message["body"], message.get(PROGRESS_KEY)))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    def take_progress() -> Encoded:
        nonlocal num_taken
        num_taken += 1
        return num_taken, (), 0, False, False

    stream = EventStream(
        "r", events(), close=lambda: None, take_progress=take_progress, waiting_event=b"ping"
    )
    await stream({}, receive, send)
    return sent


@in_virtual_time
async def test_a_client_that_leaves_hears_nothing_more() -> None:
    sent: list[Message] = []

    async def events() -> AsyncGenerator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.sleep(50.0)
        return {"type": "http.disconnect"}

    await EventStream("r", events(), close=lambda: None, waiting_event=b"ping")({}, receive, send)
    await asyncio.sleep(100.0)
    assert len(sent) == 4
