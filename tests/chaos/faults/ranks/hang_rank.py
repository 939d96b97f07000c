"""A rank hangs."""

from __future__ import annotations

import contextlib

import psutil

from tests.chaos.faults.fault import Fault, Scene

__all__ = ["HangRank"]


class HangRank(Fault):
    """SIGSTOP of a rank, without SIGCONT: the server has to notice and replace it."""

    name = "a rank hangs"
    targets = frozenset({"server", "serve"})
    needs_rank_processes = True

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._stopped: list[psutil.Process] = []

    async def inject(self) -> None:
        ranks = self._scene.target.ranks()
        if ranks:
            rank = self._scene.generator.choice(ranks)
            self._stopped.append(rank)
            self._scene.hung.add(rank)
            # A pair's other fault may just have killed it.
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.suspend()

    def is_over(self) -> bool:
        return not any(one.is_running() for one in self._stopped)
