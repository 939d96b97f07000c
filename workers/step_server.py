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
    from workers.worker import PendingStep, Worker

__all__ = ["serve_steps"]

_POLL_S = 5e-5
"""Interval of polling for the end of a step while no plan arrives."""


def serve_steps(
    worker: Worker, channel: WorkerChannel, progress: ProgressWord, *, is_first: bool
) -> None:
    """Run plans in order until a Shutdown arrives.

    A step's output is sent as soon as it is ready, and its acknowledgement once its block copies
    have ended too; a plan that arrives before is launched behind the running step. A step that
    needs masks gets them before the next plan, and after the outputs of all earlier steps are sent,
    since masks depend on these.
    """
    pending: deque[PendingStep] = deque()
    copying: deque[tuple[int, PendingStep]] = deque()
    disk = worker.disk_jobs

    def send(finished: PendingStep) -> None:
        output = finished.output()
        progress.enter(Phase.SENDING)
        if is_first:
            channel.send(output)
        if isinstance(output, StepOutput) and not output.is_acknowledged:
            copying.append((output.step, finished))
        else:
            # The copies of earlier steps have ended too.
            copying.clear()
            if not is_first:
                channel.send(StepAck(output.step))
        progress.await_copies(copying[0][0] if copying else None)
        progress.finish_step(output.step)
        progress.enter(Phase.DEVICE if pending else Phase.IDLE)

    progress.enter(Phase.IDLE)
    while True:
        if copying and copying[0][1].is_copied:
            channel.send(StepAck(copying.popleft()[0]))
            progress.await_copies(copying[0][0] if copying else None)
            continue
        if disk is not None and (report := disk.take_report()) is not None:
            channel.send(report)
            continue
        if pending and (pending[0].is_ready or len(pending) > 1):
            send(pending.popleft())
            continue
        # Waiting for the step alone would launch the next one too late and leave the device idle.
        is_busy = pending or copying or (disk is not None and disk.are_pending)
        if is_busy and not channel.has_message():
            time.sleep(_POLL_S)
            continue
        message = channel.receive()
        if isinstance(message, Shutdown):
            return
        assert not isinstance(message, StepMasks)
        launched = worker.launch(message)
        if launched.needs_masks:
            while pending:
                send(pending.popleft())
            progress.enter(Phase.MASKS)
            masks = channel.receive()
            if isinstance(masks, Shutdown):
                return
            assert isinstance(masks, StepMasks)
            launched.take_masks(masks)
        progress.enter(Phase.DEVICE)
        pending.append(launched)
