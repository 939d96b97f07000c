"""Two ranks are killed at once."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault

__all__ = ["KillTwoRanks"]


class KillTwoRanks(Fault):
    """SIGKILL of two ranks."""

    name = "two ranks are killed"
    targets = frozenset({"server", "serve"})
    needs_rank_processes = True

    async def inject(self) -> None:
        ranks = self._scene.target.ranks()
        for rank in self._scene.generator.sample(ranks, min(2, len(ranks))):
            rank.kill()
