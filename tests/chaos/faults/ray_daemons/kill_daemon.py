"""One of Ray's own processes is killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tests.chaos.faults.fault import Fault, Scene
from tests.chaos.targets.target import named

if TYPE_CHECKING:
    import psutil

__all__ = ["KillGcs", "KillRaylet"]


class _KillDaemon(Fault):
    """SIGKILL: open streams finish, and the server ends to be started again."""

    needs_rank_processes = True
    limit_s = 180.0
    pairs_with_others = False
    daemon: ClassVar[str]
    """A word of its command line."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._servers: list[psutil.Process] = []

    async def inject(self) -> None:
        self._servers = self._scene.target.servers()
        for process in named(self._scene.target.family(), self.daemon):
            process.kill()

    def is_over(self) -> bool:
        # Without this process of Ray, a server cannot go on for long.
        return not any(one.is_running() for one in self._servers)


class KillGcs(_KillDaemon):
    """Ray's global control service ends."""

    name = "Ray's GCS is killed"
    daemon = "gcs_server"


class KillRaylet(_KillDaemon):
    """The raylet ends, the parent of all ranks of its node."""

    name = "Ray's raylet is killed"
    daemon = "raylet/raylet"
