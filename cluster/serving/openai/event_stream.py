"""Responses that end when their client disconnects: event streams, and awaited work.

A stream that can be resumed continues without its response.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cluster.serving.continuation import PROGRESS_KEY
from cluster.serving.http.kept_response import pieces_of
from cluster.serving.openai.waiting_events import WaitingEvents

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine

    from starlette.types import Receive, Scope, Send

    from cluster.serving.continuation import Encoded

__all__ = ["EventStream", "unless_disconnected"]

_PAUSE_RATIO = 3.0
"""How long a pause between pieces is, compared with the time to send one."""
_MAX_PAUSE_S = 0.01

Result = TypeVar("Result")


class EventStream(Response):
    """Server-sent events, until they end or their client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request_id: str,
        events: AsyncGenerator[bytes | tuple[bytes, ...]],
        *,
        close: Callable[[], None],
        take_progress: Callable[[], Encoded] | None = None,
        waiting_event: bytes | None = None,
    ) -> None:
        """`close` ends what makes the events.

        `take_progress` returns what the events since the last call add; it is sent with them.
        `waiting_event` is sent after every 15 seconds without an event.
        """
        super().__init__(
            headers={
                "x-request-id": request_id,
                "cache-control": "no-store",
                # A buffering proxy would delay tokens.
                "x-accel-buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._take_progress = take_progress
        self._waiting_event = waiting_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._write(send))
        except ClientDisconnect:
            pass
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            if self._waiting_event is None:
                async for written in events:
                    await self._send_event(written, send)
            else:
                await self._write_all(events, self._waiting_event, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_all(
        self, events: AsyncIterator[bytes | tuple[bytes, ...]], waiting_event: bytes, send: Send
    ) -> None:
        """Send the events, and others while there are none."""
        waiting = WaitingEvents(lambda: self._send_event(waiting_event, send))
        async with waiting.sending():
            async for written in events:
                await waiting.hold()
                await self._send_event(written, send)
                waiting.release()

    async def _send_event(self, written: bytes | tuple[bytes, ...], send: Send) -> None:
        if self._take_progress is None:
            if isinstance(written, tuple):
                await _send_parts(written, send)
                return
            await send({"type": "http.response.body", "body": written, "more_body": True})
            return
        if isinstance(written, tuple):
            written = b"".join(written)
        await send(
            {
                "type": "http.response.body",
                "body": written,
                "more_body": True,
                PROGRESS_KEY: self._take_progress(),
            }
        )


async def _send_parts(parts: tuple[bytes, ...], send: Send) -> None:
    """Send large events as the client reads them."""
    pause_s: float | None = None
    for piece in pieces_of(parts):
        if pause_s is not None:
            # While its client reads fast, sending waits for nothing, but others have tokens to
            # send.
            await asyncio.sleep(pause_s)
        began_s = time.perf_counter()
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        pause_s = min(_PAUSE_RATIO * (time.perf_counter() - began_s), _MAX_PAUSE_S)


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """Return what `work` returns; cancel it and raise ClientDisconnect when the client leaves."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
