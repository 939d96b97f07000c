"""A replica of Ray Serve is killed."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault

__all__ = ["KillReplica"]


class KillReplica(Fault):
    """SIGKILL of a replica, with the controller of its engine."""

    name = "a Serve replica is killed"
    targets = frozenset({"serve"})
    limit_s = 120.0

    async def inject(self) -> None:
        self._scene.generator.choice(self._scene.target.servers()).kill()
