"""The server and all ranks are stopped for a few seconds, as when a machine is suspended."""

from __future__ import annotations

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.pauses import pause

__all__ = ["PauseEverything"]

_SECONDS = 8.0


class PauseEverything(Fault):
    """SIGSTOP of the server and of all ranks, and SIGCONT."""

    name = "the server and all ranks pause"
    targets = frozenset({"server", "serve"})

    async def inject(self) -> None:
        target = self._scene.target
        await pause(self._scene, [*target.servers(), *target.ranks()], seconds=_SECONDS)
