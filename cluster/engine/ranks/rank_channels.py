"""The controller's ends of the step channels of one group.

Nothing here waits for a single rank: a plan that a rank is too busy to receive, and a message that
is not complete, stay in buffers while the other ranks are served.
"""

from __future__ import annotations

import select
from collections import deque
from typing import TYPE_CHECKING

from cluster.engine.ranks.rank_lines import log_rank_line
from pagedray.batch import DiskReport, EmbedOutput, RankLogLine, Shutdown, StepOutput, WorkerFailure
from pagedray.channel import ChannelClosedError
from pagedray.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedray.batch import EmbedPlan, StepMasks, StepPlan, WorkerMessage
    from pagedray.channel import ControllerChannel

__all__ = ["DiskReports", "RankChannels"]


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
        self.outputs: deque[StepOutput | EmbedOutput] = deque()
        self.disk_reports = DiskReports(len(self._channels))

    def send(self, message: StepPlan | StepMasks | EmbedPlan) -> None:
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
        if not isinstance(message, StepOutput) or message.is_acknowledged:
            self.acknowledged[rank] = message.step
        if isinstance(message, StepOutput | EmbedOutput):
            self.outputs.append(message)


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
