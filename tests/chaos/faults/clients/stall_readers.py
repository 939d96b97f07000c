"""Clients stop reading their streams."""

from __future__ import annotations

import asyncio
import contextlib

from tests.chaos.faults.clients.raw_stream import RawStream
from tests.chaos.faults.fault import Fault

__all__ = ["StallReaders"]

_NUM_CLIENTS = 4
_SECONDS = 15.0
_OPEN_TIMEOUT_S = 10.0


class StallReaders(Fault):
    """Streams with small receive buffers that are not read for a few seconds."""

    name = "readers stall"
    targets = frozenset({"server", "serve"})

    async def inject(self) -> None:
        streams = [RawStream(self._scene) for _ in range(_NUM_CLIENTS)]
        for stream in streams:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_OPEN_TIMEOUT_S):
                    await stream.open(num_sequences=4)
        await asyncio.sleep(_SECONDS)
        for stream in streams:
            stream.close()
