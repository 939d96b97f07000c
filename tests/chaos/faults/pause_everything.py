"""The server and all ranks are stopped for some seconds, as when a machine is suspended."""

from __future__ import annotations

import asyncio
import contextlib

import psutil

from tests.chaos.faults.fault import Fault

__all__ = ["PauseEverything"]

_SECONDS = 8.0


class PauseEverything(Fault):
    """SIGSTOP of the server and of all ranks, and SIGCONT."""

    name = "the server and all ranks pause"
    targets = frozenset({"server", "serve"})

    async def inject(self) -> None:
        stopped = [*self._scene.target.servers(), *self._scene.target.ranks()]
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        await asyncio.sleep(_SECONDS)
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
