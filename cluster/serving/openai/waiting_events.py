"""Events that tell the client of a stream that it is alive while there are no others."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["WaitingEvents"]

_INTERVAL_S = 15.0
"""Proxies and clients often close a connection on which nothing arrives for a minute or more."""


class WaitingEvents:
    """Sends an event after every 15 seconds in which nothing else was sent."""

    def __init__(self, send: Callable[[], Awaitable[None]]) -> None:
        """`send` sends one such event."""
        self._send = send
        self._is_held = False
        self._being_sent: asyncio.Future[None] | None = None
        self._last_s = 0.0
        """When the last event of any kind was sent."""

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send them inside of the block."""
        self._last_s = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            # If the client does not read, sending the next event fails as well.
            await asyncio.gather(task, return_exceptions=True)

    async def hold(self) -> None:
        """Send none until `release` is called, and wait for one that is being sent."""
        self._is_held = True
        if self._being_sent is not None:
            await self._being_sent

    def release(self) -> None:
        """Note that another event has been sent."""
        self._is_held = False
        self._last_s = asyncio.get_running_loop().time()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            passed_s = loop.time() - self._last_s
            if self._is_held or passed_s < _INTERVAL_S:
                await asyncio.sleep(_INTERVAL_S if self._is_held else _INTERVAL_S - passed_s)
                continue
            self._being_sent = loop.create_future()
            try:
                await self._send()
            finally:
                self._being_sent.set_result(None)
                self._being_sent = None
            self._last_s = loop.time()
