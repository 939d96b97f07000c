"""Reads and writes of cached blocks on a disk in virtual time.

They behave like `DiskJobs`: a thread reads and another writes, each in the order of plans, and no
step waits for them.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from pagedray.batch import DiskReport

if TYPE_CHECKING:
    from pagedray.batch import StepPlan

__all__ = ["VirtualDisk"]


class _Job(NamedTuple):
    """The reads or writes of a plan."""

    ended_s: float
    report: DiskReport


class VirtualDisk:
    """A disk that never fails."""

    def __init__(self, *, read_s: float, write_s: float) -> None:
        """Give the seconds for each block."""
        self._seconds = {True: read_s, False: write_s}
        self._jobs: dict[bool, deque[_Job]] = {True: deque(), False: deque()}
        """Reads and writes that were not reported."""
        self._free_s = {True: 0.0, False: 0.0}
        """When each thread has finished its work."""

    @property
    def next_report_s(self) -> float:
        """When the next report comes; infinite if none does."""
        return min((jobs[0].ended_s for jobs in self._jobs.values() if jobs), default=inf)

    def launch(self, plan: StepPlan, now_s: float) -> None:
        """Begin the reads and writes of a plan, after earlier plans."""
        for is_read, copies in ((True, plan.disk_reads), (False, plan.disk_writes)):
            if not copies:
                continue
            seconds = len(copies) * self._seconds[is_read]
            ended_s = max(now_s, self._free_s[is_read]) + seconds
            self._free_s[is_read] = ended_s
            report = DiskReport(plan.step, is_read, seconds=seconds)
            self._jobs[is_read].append(_Job(ended_s, report))

    def take_reports(self, now_s: float) -> list[DiskReport]:
        """Return the reports since the last call."""
        reports = []
        for jobs in self._jobs.values():
            while jobs and jobs[0].ended_s <= now_s:
                reports.append(jobs.popleft().report)
        return reports
