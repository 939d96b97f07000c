"""Limits how many messages streams send, because Serve's queues have no bound."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Message, Send

__all__ = ["MESSAGES_PER_S", "MessagePace", "PacedStream"]

MESSAGES_PER_S = 800.0
"""Serve carries about a thousand messages a second from a replica, and more over HTTP."""


class MessagePace:
    """Shares a number of messages a second among the streams that have begun."""

    def __init__(self, messages_per_s: float) -> None:
        self._messages_per_s = messages_per_s
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[PacedStream]:
        """Yield a stream, counted from its first message to the end of the block."""
        stream = PacedStream(self)
        try:
            yield stream
        finally:
            self._num_streams -= stream.has_begun

    def pause_s(self, stream: PacedStream) -> float:
        """Return how long a stream must wait after a message; a single stream hardly waits."""
        self._num_streams += not stream.has_begun
        stream.has_begun = True
        return self._num_streams / self._messages_per_s


class PacedStream:
    """A streamed response."""

    def __init__(self, pace: MessagePace) -> None:
        self._pace = pace
        self.has_begun = False
        """Whether it has sent a message."""

    async def pause(self) -> None:
        """Wait after a message; output that arrives meanwhile is merged into the next message."""
        await asyncio.sleep(self._pace.pause_s(self))

    def paced(self, send: Send) -> Send:
        """Return a `send` that waits after each part of a response but the last."""

        async def send_paced(message: Message) -> None:
            await send(message)
            if message.get("more_body", False):
                await self.pause()

        return send_paced
