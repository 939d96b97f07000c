"""The memory of a server and its child processes over time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MemoryWatch"]

_EVERY_S = 0.05


class MemoryWatch:
    """Samples the resident memory of processes, in MiB."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = processes
        self.peak_mib = 0.0
        """The most since the watch was made."""

    def sample_mib(self) -> float:
        """Return the memory."""
        total = 0
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        mib = total / 2**20
        self.peak_mib = max(self.peak_mib, mib)
        return mib

    async def watch(self) -> None:
        """Sample until it is cancelled."""
        while True:
            self.sample_mib()
            await asyncio.sleep(_EVERY_S)
