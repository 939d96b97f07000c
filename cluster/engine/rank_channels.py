"""The controller's ends of the step channels of one group.

Nothing here waits for a single rank: a plan that a rank is too busy to receive, and a message that
is not complete, stay in buffers while the other ranks are served.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections import defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray._private.state import actors
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pagedray.batch import DiskReport, RankLogLine, Shutdown, StepOutput, WorkerFailure
from pagedray.channel import ChannelClosedError
from pagedray.errors import WorkerError
from pagedray.machine import kill_process, process_status
from pagedray.rank_progress import ProgressBoard, RankReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedray.batch import StepMasks, StepPlan, WorkerMessage
    from pagedray.channel import ControllerChannel

__all__ = ["DiskReports", "RankChannels", "RayReports", "log_rank_line"]

logger = logging.getLogger(__name__)

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


class RankChannels:
    """Sends plans to every rank, and collects outputs and acknowledgements."""

    def __init__(self, channels: Sequence[ControllerChannel]) -> None:
        """`channels` are by rank; `close` closes them."""
        self._channels = tuple(channels)
        self._rank_of = {channel.fileno(): rank for rank, channel in enumerate(channels)}
        self._unsent: set[int] = set()
        """Ranks with plans that their sockets have not taken completely."""
        self._poller = select.poll()
        for channel in self._channels:
            self._poller.register(channel, select.POLLIN)
        self.acknowledged = [-1] * len(self._channels)
        """The last step that each rank has finished."""
        self.outputs: deque[StepOutput] = deque()
        self.disk_reports = DiskReports(len(self._channels))

    def send(self, message: StepPlan | StepMasks) -> None:
        """Send a message to every rank; `exchange` sends the rest to ranks that are busy.

        Raises ChannelClosedError if a rank is gone.
        """
        for rank, channel in enumerate(self._channels):
            channel.post(message)
            self._flush(rank)

    def exchange(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until a rank can be served; receive and send without waiting.

        Raises ChannelClosedError if a rank is gone, and WorkerError if it reports a failure.
        """
        for descriptor, events in self._poller.poll(timeout_s * 1e3):
            rank = self._rank_of[descriptor]
            # Messages that a rank sent before it ended come before the end-of-file.
            if events & ~select.POLLOUT:
                for message in self._channels[rank].received():
                    self._take(rank, message)
            if events & select.POLLOUT:
                self._flush(rank)

    def shut_down(self) -> None:
        """Tell every rank to end, except ranks that are gone or busy with earlier messages."""
        for channel in self._channels:
            try:
                channel.post(Shutdown())
            except ChannelClosedError:
                continue

    def close(self) -> None:
        """Close the channels, which also ends the ranks."""
        for channel in self._channels:
            channel.close()

    def _flush(self, rank: int) -> None:
        channel = self._channels[rank]
        if channel.flush():
            if rank in self._unsent:
                self._unsent.remove(rank)
                self._poller.modify(channel, select.POLLIN)
        elif rank not in self._unsent:
            self._unsent.add(rank)
            self._poller.modify(channel, select.POLLIN | select.POLLOUT)

    def _take(self, rank: int, message: WorkerMessage) -> None:
        if isinstance(message, WorkerFailure):
            if message.is_peer:
                raise ChannelClosedError(f"Rank {rank} lost the connection to another rank.")
            last_line = message.text.strip().rpartition("\n")[2]
            raise WorkerError(f"Rank {rank} failed: {last_line}.", details=message.text.strip())
        if isinstance(message, DiskReport):
            self.disk_reports.add_report(rank, message)
            return
        if isinstance(message, RankLogLine):
            log_rank_line(rank, message)
            return
        if isinstance(message, StepOutput):
            self.outputs.append(message)
            if not message.is_acknowledged:
                return
        self.acknowledged[rank] = message.step


class DiskReports:
    """Joins the reports of all ranks for the same plan."""

    def __init__(self, num_ranks: int) -> None:
        self._by_kind = {
            is_read: [deque[DiskReport]() for _ in range(num_ranks)] for is_read in (True, False)
        }

    def add_report(self, rank: int, report: DiskReport) -> None:
        """Add the report of a rank; each rank reports in the order of plans for each kind."""
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


def log_rank_line(rank: int, line: RankLogLine) -> None:
    """Log a line of a rank at its level."""
    logger.log(line.level, "Rank %s: %s", rank, line.text)


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
