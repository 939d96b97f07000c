"""A replica of Ray Serve hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.faults.fault import Fault, Scene

if TYPE_CHECKING:
    import psutil

__all__ = ["HangReplica"]


class HangReplica(Fault):
    """SIGSTOP of a replica, without SIGCONT: Serve has to replace it."""

    name = "a Serve replica hangs"
    targets = frozenset({"serve"})
    limit_s = 180.0
    pause_limit_s = 30.0
    pairs_with_others = False

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._stopped: list[psutil.Process] = []

    async def inject(self) -> None:
        server = self._scene.generator.choice(self._scene.target.servers())
        server.suspend()
        self._stopped.append(server)

    def is_over(self) -> bool:
        return not any(one.is_running() for one in self._stopped)
