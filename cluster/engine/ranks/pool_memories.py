"""The memory of a group's CPU pools, which outlives the ranks that die."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pagedray.node_memory import NodeMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedray.node_memory import MemoryAddress
    from pagedray.rank_progress import PoolReport

__all__ = ["PoolMemories"]

logger = logging.getLogger(__name__)


class PoolMemories:
    """The memories of the CPU pools, by rank."""

    def __init__(self, num_ranks: int) -> None:
        self._memories: list[NodeMemory | None] = [self._make_memory() for _ in range(num_ranks)]
        self._is_lost = False
        """Whether some rank has a new pool."""
        self._damaged: set[int] = set()

    def address(self, rank: int) -> MemoryAddress | None:
        """Return where a rank finds its memory, or None if there is none."""
        memory = self._memories[rank]
        return None if memory is None else memory.address

    def note_reports(self, reports: Sequence[PoolReport]) -> None:
        """Note the reports of ranks about their pools, by rank, before they serve steps."""
        for rank, report in enumerate(reports):
            # The memory is older than the rank's own pool: no later rank may find it.
            if not report.is_shared and (memory := self._memories[rank]) is not None:
                memory.close()
                self._memories[rank] = self._make_memory()
            self._is_lost = self._is_lost or not report.is_kept
            self._damaged.update(report.damaged)

    def take_damaged(self) -> list[int] | None:
        """Return the blocks that are damaged on some rank, or None if some rank has a new pool.

        Covers all reports since the last call: a rank may have died after its report, and the next
        rank has kept a pool that was new.
        """
        damaged = None if self._is_lost else sorted(self._damaged)
        self._is_lost = False
        self._damaged.clear()
        return damaged

    def renew(self) -> None:
        """Give the next ranks other memory, and free this memory, which no rank uses."""
        self.close()
        self._memories = [self._make_memory() for _ in self._memories]

    def close(self) -> None:
        """Free the memory once no rank uses it. May be called twice."""
        for memory in self._memories:
            if memory is not None:
                memory.close()

    def _make_memory(self) -> NodeMemory | None:
        try:
            return NodeMemory("cpu-pool")
        except OSError as error:
            logger.warning("The CPU pools will not outlive their ranks: %s.", error.strerror)
            return None
