"""A rank is killed, and then one of those that replace it."""

from __future__ import annotations

import asyncio
import time

from tests.chaos.faults.fault import Fault

__all__ = ["KillDuringReplacement"]

_WAIT_S = 30.0


class KillDuringReplacement(Fault):
    """SIGKILL of a rank, and of a rank of the next group while it starts."""

    name = "a rank is killed while ranks are replaced"
    targets = frozenset({"server", "serve"})
    needs_rank_processes = True
    limit_s = 90.0

    async def inject(self) -> None:
        target = self._scene.target
        old = target.ranks()
        if not old:
            return
        self._scene.generator.choice(old).kill()
        deadline_s = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline_s:
            started = [rank for rank in target.ranks() if rank not in old]
            if started:
                started[0].kill()
                return
            await asyncio.sleep(0.02)
