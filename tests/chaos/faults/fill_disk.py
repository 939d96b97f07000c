"""The disk is full, and a rank dies meanwhile."""

from __future__ import annotations

import asyncio

from tests.chaos.faults.fault import Fault

__all__ = ["FillDisk"]

_SECONDS = 8.0


class FillDisk(Fault):
    """Not a byte is left for temporary files and Ray's files while a rank is killed."""

    name = "the disk is full"
    needs_rank_processes = True
    needs_disk = True
    pairs_with_others = False

    async def inject(self) -> None:
        disk = self._scene.target.disk
        assert disk is not None
        disk.fill()
        try:
            self._scene.generator.choice(self._scene.target.ranks()).kill()
            await asyncio.sleep(_SECONDS)
        finally:
            disk.empty()
