"""The controller's end of the step channel of one simulated rank."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from pagedray.batch import DiskReport, StepAck, StepMasks, StepOutput, StepPlan, WorkerFailure
from pagedray.channel import StepChannel
from pagedray.errors import WorkerError

if TYPE_CHECKING:
    from pagedray.batch import ControllerMessage, WorkerMessage
    from tests.simulation.virtual_socket import VirtualSocket
    from tests.simulation.world import World

__all__ = ["ControllerEnd"]

_HANG_S = 1.0
"""Time after which a rank that does not answer counts as hung."""


class ControllerEnd:
    """Sends messages to a rank, and keeps what it has answered."""

    def __init__(self, world: World, socket: VirtualSocket) -> None:
        self._world = world
        self._channel: StepChannel[ControllerMessage, WorkerMessage] = StepChannel(
            socket,  # type: ignore[arg-type]  # it has what channels use
            StepOutput | StepAck | DiskReport | WorkerFailure,
        )
        socket.on_arrival = self._note_news
        self.has_news = False
        """Whether something has arrived since this was last set to False."""
        self.outputs: deque[StepOutput] = deque()
        self.disk_reports: deque[DiskReport] = deque()
        self.acknowledged_step = -1
        self.hang_s = math.inf
        """When the rank counts as hung unless it answers."""
        self._posted_step = -1
        self._num_disk_jobs = 0
        """Reads and writes of plans that the rank has not reported."""

    def post(self, message: StepPlan | StepMasks) -> None:
        """Send a message to the rank. Raises WorkerError if it is gone."""
        if math.isinf(self.hang_s):
            self.hang_s = self._world.now_s() + _HANG_S
        self._posted_step = message.step
        if isinstance(message, StepPlan):
            self._num_disk_jobs += bool(message.disk_reads) + bool(message.disk_writes)
        self._channel.post(message)
        while not self._channel.flush():
            pass

    def receive(self) -> None:
        """Take what has arrived. Raises WorkerError if the rank is gone or has failed."""
        for message in self._channel.received():
            if isinstance(message, WorkerFailure):
                raise WorkerError("A rank failed.", details=message.text)
            assert isinstance(message, StepOutput | StepAck | DiskReport)
            if isinstance(message, DiskReport):
                self.disk_reports.append(message)
                self._num_disk_jobs -= 1
            elif isinstance(message, StepAck) or message.is_acknowledged:
                assert message.step == self.acknowledged_step + 1
                self.acknowledged_step = message.step
            # One that only copies blocks is noticed too, since its process beats no more.
            is_idle = self.acknowledged_step == self._posted_step and not self._num_disk_jobs
            self.hang_s = math.inf if is_idle else self._world.now_s() + _HANG_S
            if isinstance(message, StepOutput):
                self.outputs.append(message)

    def _note_news(self) -> None:
        self.has_news = True
