"""A rank is stopped for a few seconds and continues."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.pauses import pause

__all__ = ["StopRank"]

_SECONDS = 4.0


class StopRank(Fault):
    """SIGSTOP of a rank, and SIGCONT before a watchdog must have noticed."""

    name = "a rank pauses"
    targets = frozenset({"server", "serve"})
    needs_rank_processes = True

    async def inject(self) -> None:
        ranks = self._scene.target.ranks()
        if ranks:
            chosen = self._scene.generator.choice(ranks)
            await pause(self._scene, [chosen], seconds=_SECONDS)
