"""The network cuts connections, and clients resume their streams."""

from __future__ import annotations

import asyncio

from tests.chaos.faults.fault import Fault

__all__ = ["CutConnections"]

_NUM_CUTS = 4
_LONGEST_S = 2.0


class CutConnections(Fault):
    """Resets of all relayed connections, a few times."""

    name = "connections are cut"

    async def inject(self) -> None:
        for _ in range(_NUM_CUTS):
            for relay in self._scene.relays:
                relay.cut()
            await asyncio.sleep(self._scene.generator.random() * _LONGEST_S)
