"""The server receives SIGTERM while streams are open; its supervisor starts it again."""

from __future__ import annotations

import asyncio
import contextlib

import psutil

from tests.chaos.faults.fault import Fault

__all__ = ["Terminate"]


class Terminate(Fault):
    """SIGTERM: the open streams finish within --drain-s, and others are refused."""

    name = "SIGTERM"
    limit_s = 180.0
    pairs_with_others = False

    async def inject(self) -> None:
        for server in self._scene.target.servers():
            server.terminate()
            while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
                with contextlib.suppress(psutil.NoSuchProcess):
                    await asyncio.sleep(0.1)
