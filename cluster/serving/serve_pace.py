"""How often a stream hands on what it has, so that a carrier of few messages is not flooded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message, Send

__all__ = ["Pace"]


class Pace:
    """Spreads a number of messages a second over the streams that run."""

    def __init__(self, messages_per_s: float) -> None:
        self._messages_per_s = messages_per_s

    def pause_s(self, num_streams: int) -> float:
        """Return how long a stream is to wait after a message; a lone stream hardly waits."""
        return max(num_streams, 1) / self._messages_per_s

    def paced(self, send: Send, num_streams: Callable[[], int]) -> Send:
        """Return what sends the parts of an answer at this pace; a whole answer does not wait."""

        async def send_paced(message: Message) -> None:
            await send(message)
            if message.get("more_body", False):
                await asyncio.sleep(self.pause_s(num_streams()))

        return send_paced
