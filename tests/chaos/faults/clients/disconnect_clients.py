"""Clients disappear in the middle of their streams."""

from __future__ import annotations

import asyncio
import contextlib

from tests.chaos.faults.clients.raw_stream import RawStream
from tests.chaos.faults.fault import Fault

__all__ = ["DisconnectClients"]

_NUM_CLIENTS = 16
_LATEST_S = 1.0
_OPEN_TIMEOUT_S = 10.0


class DisconnectClients(Fault):
    """Streams that are closed or reset after a random time."""

    name = "clients disconnect"
    targets = frozenset({"server", "serve"})

    async def inject(self) -> None:
        await asyncio.gather(*(self._disconnect() for _ in range(_NUM_CLIENTS)))

    async def _disconnect(self) -> None:
        stream = RawStream(self._scene)
        # A server that restarts meanwhile answers no client.
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await stream.open(num_sequences=2)
        await asyncio.sleep(self._scene.generator.random() * _LATEST_S)
        if self._scene.generator.random() < 0.5:
            stream.reset()
        else:
            stream.close()
