"""The loop of a rank: runs the plans of the step channel and sends what they compute."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from pagedray.batch import Shutdown, StepAck, StepMasks, StepOutput
from pagedray.rank_progress import Phase

if TYPE_CHECKING:
    from pagedray.channel import WorkerChannel
    from pagedray.rank_progress import ProgressWord
    from workers.rank_log import RankLog
    from workers.worker import PendingStep, Worker

__all__ = ["serve_steps"]

_POLL_S = 5e-5
"""Interval of polling for the end of a step while no plan arrives."""
_IDLE_S = 0.05
"""Time without a step after which idle time is used; shorter pauses are between steps."""


def serve_steps(
    worker: Worker,
    channel: WorkerChannel,
    progress: ProgressWord,
    log: RankLog,
    *,
    sends_outputs: bool,
) -> None:
    """Run plans in order until a Shutdown arrives.

    A step's output is sent as soon as it is ready, by the rank of a group that `sends_outputs`, and
    its acknowledgement once its block copies have ended too; a plan that arrives before is launched
    after the running step. A step that needs masks gets them before the next plan, and after the
    outputs of all earlier steps are sent, since masks depend on these. Between plans, the worker
    uses its idle time. Lines of the log are sent between steps.
    """
    _StepServer(worker, channel, progress, log, sends_outputs=sends_outputs).serve()


class _StepServer:
    """The steps of a rank that run, and those whose copies do."""

    def __init__(
        self,
        worker: Worker,
        channel: WorkerChannel,
        progress: ProgressWord,
        log: RankLog,
        *,
        sends_outputs: bool,
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._progress = progress
        self._log = log
        self._sends_outputs = sends_outputs
        self._disk = worker.disk_jobs
        self._pending: deque[PendingStep] = deque()
        self._copying: deque[tuple[int, PendingStep]] = deque()
        self._uses_idle_time = False
        """Whether it has, since the last message."""

    def serve(self) -> None:
        """Launch plans and send what has ended until a Shutdown arrives."""
        self._progress.enter(Phase.IDLE)
        while True:
            if self._send_what_ended():
                continue
            # Waiting for the step alone would launch the next one too late and leave the device
            # idle.
            if self._is_busy and not self._channel.has_message():
                time.sleep(_POLL_S)
                continue
            if not self._channel.has_message(0.0 if self._uses_idle_time else _IDLE_S):
                self._uses_idle_time = self._worker.use_idle_time()
                self._progress.enter(Phase.IDLE)
                if self._uses_idle_time:
                    continue
            message = self._channel.receive()
            self._uses_idle_time = False
            if isinstance(message, Shutdown):
                return
            assert not isinstance(message, StepMasks)
            launched = self._worker.launch(message)
            if launched.needs_masks and not self._receive_masks(launched):
                return
            self._progress.enter(Phase.DEVICE)
            self._pending.append(launched)

    @property
    def _is_busy(self) -> bool:
        has_steps = bool(self._pending or self._copying)
        return has_steps or (self._disk is not None and self._disk.are_pending)

    def _send_what_ended(self) -> bool:
        """Send lines, an acknowledgement, a report or an output; return False if none is ready."""
        if self._log.has_lines:
            for line in self._log.take_lines():
                self._channel.send(line)
            return True
        if self._copying and self._copying[0][1].is_copied:
            self._channel.send(StepAck(self._copying.popleft()[0]))
            self._await_copies()
            return True
        if self._disk is not None and (report := self._disk.take_report()) is not None:
            self._channel.send(report)
            return True
        if self._pending and (self._pending[0].is_ready or len(self._pending) > 1):
            self._send_output(self._pending.popleft())
            return True
        return False

    def _send_output(self, finished: PendingStep) -> None:
        output = finished.output()
        self._progress.enter(Phase.SENDING)
        if self._sends_outputs:
            self._channel.send(output)
        if isinstance(output, StepOutput) and not output.is_acknowledged:
            self._copying.append((output.step, finished))
        else:
            # The copies of earlier steps have ended too.
            self._copying.clear()
            if not self._sends_outputs:
                self._channel.send(StepAck(output.step))
        self._await_copies()
        self._progress.finish_step(output.step)
        self._progress.enter(Phase.DEVICE if self._pending else Phase.IDLE)

    def _await_copies(self) -> None:
        self._progress.await_copies(self._copying[0][0] if self._copying else None)

    def _receive_masks(self, launched: PendingStep) -> bool:
        """Give a step its masks; return False if a Shutdown arrives in their place."""
        while self._pending:
            self._send_output(self._pending.popleft())
        self._progress.enter(Phase.MASKS)
        masks = self._channel.receive()
        if isinstance(masks, Shutdown):
            return False
        assert isinstance(masks, StepMasks)
        launched.take_masks(masks)
        return True
