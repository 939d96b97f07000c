"""One of Ray's own processes hangs for some time."""

from __future__ import annotations

from typing import ClassVar

from tests.chaos.faults.fault import Fault
from tests.chaos.faults.pauses import pause
from tests.chaos.targets.target import named

__all__ = ["HangGcs", "HangRaylet"]

_SECONDS = 20.0
"""Longer than it takes to notice, shorter than it takes until the server gives up."""


class _HangDaemon(Fault):
    """SIGSTOP and SIGCONT: streams go on, and the server is not ready meanwhile."""

    needs_rank_processes = True
    # A rank that dies meanwhile cannot be replaced.
    pairs_with_others = False
    daemon: ClassVar[str]
    """A word of its command line."""

    async def inject(self) -> None:
        processes = named(self._scene.target.family(), self.daemon)
        await pause(self._scene, processes, seconds=_SECONDS)


class HangGcs(_HangDaemon):
    """Ray's global control service hangs."""

    name = "Ray's GCS hangs"
    daemon = "gcs_server"


class HangRaylet(_HangDaemon):
    """The raylet hangs, the parent of all ranks of its node."""

    name = "Ray's raylet hangs"
    daemon = "raylet/raylet"
