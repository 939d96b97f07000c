"""A rank's process is killed."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault

__all__ = ["KillRank"]


class KillRank(Fault):
    """SIGKILL of one rank."""

    name = "a rank is killed"
    targets = frozenset({"server", "serve"})
    needs_rank_processes = True

    async def inject(self) -> None:
        ranks = self._scene.target.ranks()
        if ranks:
            self._scene.generator.choice(ranks).kill()
