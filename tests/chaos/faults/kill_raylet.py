"""Ray's raylet is killed, and with it all ranks of its node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.faults.fault import Fault, Scene
from tests.chaos.targets.target import named

if TYPE_CHECKING:
    import psutil

__all__ = ["KillRaylet"]


class KillRaylet(Fault):
    """SIGKILL of the raylet: streams end with an error, and the server is started again."""

    name = "Ray's raylet is killed"
    needs_rank_processes = True
    may_end_streams = True
    limit_s = 180.0
    pairs_with_others = False

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._servers: list[psutil.Process] = []

    async def inject(self) -> None:
        self._servers = self._scene.target.servers()
        for process in named(self._scene.target.family(), "raylet/raylet"):
            process.kill()

    def is_over(self) -> bool:
        return not any(one.is_running() for one in self._servers)
