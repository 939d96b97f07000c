"""Ray Serve's controller is killed."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault
from tests.chaos.targets.target import named

__all__ = ["KillServeController"]


class KillServeController(Fault):
    """SIGKILL of the actor that starts, watches and scales replicas; Ray starts it again."""

    name = "Serve's controller is killed"
    targets = frozenset({"serve"})

    async def inject(self) -> None:
        for controller in named(self._scene.target.family(), "ServeController"):
            controller.kill()
