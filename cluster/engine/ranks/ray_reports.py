"""Reads the progress of a group's ranks: from shared memory, or from other nodes over Ray."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray._private.state import actors
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pagedray.machine import kill_process, process_status
from pagedray.rank_progress import ProgressBoard, RankReport

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RayReports"]

_LOOK_UP_PERIOD_S = 1.0
_KILL_TIMEOUT_S = 5.0
"""A new process of Ray that kills a process on another node starts within seconds."""
_STOPPED = "T"
_STATES = {
    _STOPPED: "is stopped",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a driver",
}
"""States of a process in /proc/PID/stat that explain a hang."""


class RayReports:
    """The reports of one epoch's ranks, and their processes on this node."""

    def __init__(self, num_ranks: int) -> None:
        self._board = ProgressBoard(num_ranks)
        self._is_closed = False
        self._actors: Sequence[Any] = ()
        self._nodes: Sequence[str] = ()
        self._asked: dict[int, Any] = {}
        """The calls of ranks on other nodes that are under way."""
        self._answers = {rank: self._board.report(rank) for rank in range(num_ranks)}
        self._own_node = ray.get_runtime_context().get_node_id()
        self._next_look_up_s: defaultdict[int, float] = defaultdict(float)
        self._starting: dict[int, int] = {}
        """The processes of ranks on this node that have not written to the board."""
        self._processes: dict[int, int] = {}
        """A descriptor of each rank's process on this node, which no other process takes over."""

    def attach_actors(self, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        """Give the board to the epoch's actors, by rank; actors that cannot open it are asked."""
        self._actors, self._nodes = tuple(actors), tuple(nodes)
        for rank, actor in enumerate(actors):
            actor.attach_board.remote(self._board.address, rank)

    def read(self) -> list[RankReport]:
        """Return the latest report of each rank; waits for Ray only while ranks start."""
        reports = []
        for rank in range(len(self._answers)):
            report = self._board.report(rank)
            if report.pid:
                self._open_process(rank, report.pid)
            else:
                self._ask(rank)
                report = self._answers[rank]
                if not report.pid:
                    self._look_up(rank)
            reports.append(report)
        return reports

    def process_state(self, rank: int) -> str:
        """Return the unusual state of a rank's process, or an empty string."""
        return _STATES.get(self._state_letter(rank), "")

    def is_stopped(self, rank: int) -> bool:
        """Return whether a rank's process is stopped; False if it is on another node."""
        return self._state_letter(rank) == _STOPPED

    def kill_processes(self, ranks: Sequence[int]) -> None:
        """Kill some of the ranks, regardless of the state of their processes.

        Waits briefly for other nodes. Ranks that cannot be reached are left to Ray, which waits for
        an answer of the process.
        """
        killing = []
        for rank in ranks:
            if rank in self._processes:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._processes[rank], signal.SIGKILL)
            elif (report := self._answers[rank]).pid:
                there = NodeAffinitySchedulingStrategy(self._nodes[rank], soft=False)
                kill = ray.remote(kill_process).options(
                    num_cpus=0, max_retries=0, scheduling_strategy=there
                )
                killing.append(kill.remote(report.pid, report.start_ticks))
        if killing:
            ray.wait(killing, num_returns=len(killing), timeout=_KILL_TIMEOUT_S)

    def close(self) -> None:
        """Release the board and the descriptors; another thread may still read."""
        self._is_closed = True
        self._board.close()
        while self._processes:
            os.close(self._processes.popitem()[1])
        self._asked.clear()

    def _look_up(self, rank: int) -> None:
        """Find the process of a rank that has not written to the board, if it is on this node.

        It may be stopped before it does.
        """
        if not self._actors or self._nodes[rank] != self._own_node or rank in self._processes:
            return
        now_s = time.monotonic()
        if now_s < self._next_look_up_s[rank]:
            return
        self._next_look_up_s[rank] = now_s + _LOOK_UP_PERIOD_S
        found = actors(self._actors[rank]._actor_id.hex())
        if found and found["Pid"]:
            self._starting[rank] = found["Pid"]
            self._open_process(rank, found["Pid"])

    def _state_letter(self, rank: int) -> str:
        pid = self._board.report(rank).pid or self._starting.get(rank, 0)
        try:
            return process_status(pid)[0] if pid else ""
        except OSError:
            return ""

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
