"""A rank that has no plan prepares later steps, and launches a plan that arrives meanwhile."""

from __future__ import annotations

import socket
import threading

from pagedray.batch import ControllerMessage, Shutdown, StepOutput, StepPlan, WorkerMessage
from pagedray.channel import ControllerChannel, WorkerChannel
from pagedray.rank_progress import ProgressWord
from tests.workers.copying_steps import CopyingStep, CopyingWorker
from workers.rank_lifecycle import RankLog, serve_steps

TIMEOUT_S = 60.0


class PreparingWorker(CopyingWorker):
    """Has parts to do in idle time, which end from `may_end` on."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.num_parts = num_parts
        self.events: list[str] = []
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.is_complete = threading.Event()

    def use_idle_time(self) -> bool:
        """Do a part."""
        if not self.num_parts:
            self.is_complete.set()
            return False
        self.has_begun.set()
        assert self.may_end.wait(TIMEOUT_S)
        self.num_parts -= 1
        self.events.append("part")
        return True

    def launch(self, plan: StepPlan) -> CopyingStep:
        """Launch a step whose copies have ended."""
        self.events.append(f"step {plan.step}")
        launched = super().launch(plan)
        launched.is_copied = True
        return launched


def test_a_plan_is_launched_after_the_part_during_which_it_arrives() -> None:
    ours, theirs = socket.socketpair()
    controller: ControllerChannel = ControllerChannel(ours, WorkerMessage)
    rank: WorkerChannel = WorkerChannel(theirs, ControllerMessage)
    worker = PreparingWorker(3)

    def serve() -> None:
        serve_steps(worker, rank, ProgressWord(), RankLog(), sends_outputs=True)  # type: ignore[arg-type]

    serving = threading.Thread(target=serve)
    serving.start()
    assert worker.has_begun.wait(TIMEOUT_S)
    controller.send(StepPlan(0, []))
    worker.may_end.set()
    assert controller.receive(TIMEOUT_S) == StepOutput(0, [])
    # The rest follows while no plan comes.
    assert worker.is_complete.wait(TIMEOUT_S)
    controller.send(StepPlan(1, []))
    assert controller.receive(TIMEOUT_S) == StepOutput(1, [])
    controller.send(Shutdown())
    serving.join(TIMEOUT_S)
    assert not serving.is_alive()
    assert worker.events == ["part", "step 0", "part", "part", "step 1"]
    controller.close()
    rank.close()
