"""A rank is stopped for some seconds and continues."""

from __future__ import annotations

import asyncio
import contextlib

import psutil

from tests.chaos.faults.fault import Fault

__all__ = ["StopRank"]

_SECONDS = 4.0


class StopRank(Fault):
    """SIGSTOP of a rank, and SIGCONT before a watchdog must have noticed."""

    name = "a rank pauses"
    targets = frozenset({"server", "serve"})
    needs_rank_processes = True

    async def inject(self) -> None:
        ranks = self._scene.target.ranks()
        if not ranks:
            return
        rank = self._scene.generator.choice(ranks)
        # It may have been killed meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.suspend()
        await asyncio.sleep(_SECONDS)
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.resume()
