"""Joins the reports of a group's ranks about their disk files.

A block is whole only if every rank has its part.
"""

from __future__ import annotations

from collections import deque

from pagedray.batch import DiskReport

__all__ = ["DiskReports"]


class DiskReports:
    """Joins the reports of all ranks for the same plan."""

    def __init__(self, num_ranks: int) -> None:
        self._by_kind = {
            is_read: [deque[DiskReport]() for _ in range(num_ranks)] for is_read in (True, False)
        }

    def add_report(self, rank: int, report: DiskReport) -> None:
        """Add the report of one rank; each sends those of a kind in the order of plans."""
        self._by_kind[report.is_read][rank].append(report)

    def take_joined(self) -> list[DiskReport]:
        """Return the reports that every rank has sent."""
        joined = []
        for is_read, by_rank in self._by_kind.items():
            while by_rank and all(by_rank):
                parts = [reports.popleft() for reports in by_rank]
                assert len({part.step for part in parts}) == 1
                failed = sorted({block for part in parts for block in part.failed})
                seconds = max(part.seconds for part in parts)
                joined.append(DiskReport(parts[0].step, is_read, failed, seconds))
        return joined
