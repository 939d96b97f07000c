"""Reads where the ranks of a group stand: from shared memory, or from other nodes over Ray."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from pagedray.rank_progress import ProgressBoard, RankReport

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RayReports"]

_STATES = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a disk or a driver"}
"""States of a process in /proc/PID/stat that explain a hang."""


class RayReports:
    """The reports of one epoch's ranks, and their processes on this node."""

    def __init__(self, num_ranks: int) -> None:
        self._board = ProgressBoard(num_ranks)
        self._is_closed = False
        self._actors: Sequence[Any] = ()
        self._asked: dict[int, Any] = {}
        """The calls of ranks on other nodes that are under way."""
        self._answers = {rank: self._board.report(rank) for rank in range(num_ranks)}
        self._processes: dict[int, int] = {}
        """A descriptor of each rank's process on this node, which no other process takes over."""

    def attach_actors(self, actors: Sequence[Any]) -> None:
        """Give the board to the epoch's actors, by rank; those that cannot open it are asked."""
        self._actors = tuple(actors)
        for rank, actor in enumerate(actors):
            actor.attach_board.remote(self._board.path, rank)

    def read(self) -> list[RankReport]:
        """Return the latest report of each rank; never waits."""
        reports = []
        for rank in range(len(self._answers)):
            report = self._board.report(rank)
            if report.pid:
                self._open_process(rank, report.pid)
            else:
                self._ask(rank)
                report = self._answers[rank]
            reports.append(report)
        return reports

    def process_state(self, rank: int) -> str:
        """Return what is unusual about the state of a rank's process, or an empty string."""
        pid = self._board.report(rank).pid
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ""
        # The name of the program, in parentheses, may contain spaces.
        return _STATES.get(status.rpartition(")")[2].split()[0], "")

    def kill_processes(self, ranks: Sequence[int]) -> None:
        """Kill some of the ranks on this node, whatever the state of their processes."""
        for rank in ranks:
            if rank in self._processes:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._processes[rank], signal.SIGKILL)

    def close(self) -> None:
        """Release the board and the descriptors; another thread may still read."""
        self._is_closed = True
        self._board.close()
        while self._processes:
            os.close(self._processes.popitem()[1])
        self._asked.clear()

    def _open_process(self, rank: int, pid: int) -> None:
        if rank not in self._processes and not self._is_closed:
            # It may have ended already.
            with suppress(ProcessLookupError):
                self._processes[rank] = os.pidfd_open(pid)

    def _ask(self, rank: int) -> None:
        if not self._actors:
            return
        asked = self._asked.get(rank)
        try:
            if asked is not None:
                finished, _ = ray.wait([asked], timeout=0)
                if not finished:
                    return
                self._answers[rank] = RankReport.from_cells(ray.get(asked))
            self._asked[rank] = self._actors[rank].read_progress.remote()
        except RayError:
            # The step channel reports the death of a rank.
            self._asked.pop(rank, None)
