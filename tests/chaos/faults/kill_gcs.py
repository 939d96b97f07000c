"""Ray's global control service is killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.faults.fault import Fault, Scene
from tests.chaos.targets.target import named

if TYPE_CHECKING:
    import psutil

__all__ = ["KillGcs"]


class KillGcs(Fault):
    """SIGKILL of gcs_server: open streams finish, and the server ends to be started again."""

    name = "Ray's GCS is killed"
    needs_rank_processes = True
    limit_s = 180.0
    pairs_with_others = False

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._servers: list[psutil.Process] = []

    async def inject(self) -> None:
        self._servers = self._scene.target.servers()
        for process in named(self._scene.target.family(), "gcs_server"):
            process.kill()

    def is_over(self) -> bool:
        # Without its GCS a server cannot go on for long.
        return not any(one.is_running() for one in self._servers)
