"""When a rank acknowledges steps whose block copies end later."""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from pagedray.batch import (
    ControllerMessage,
    RankLogLine,
    Shutdown,
    StepAck,
    StepOutput,
    StepPlan,
    WorkerMessage,
)
from pagedray.channel import ControllerChannel, WorkerChannel
from pagedray.rank_progress import ProgressWord, RankReport
from tests.workers.copying_steps import CopyingStep, CopyingWorker
from workers.rank_lifecycle import RankLog, serve_steps

PLANS = [StepPlan(step, []) for step in range(3)]
TIMEOUT_S = 60.0


class ScriptedChannel:
    """Delivers messages in order; what is no message is called while the rank waits."""

    def __init__(self, script: list[StepPlan | Shutdown | Callable[[], None]]) -> None:
        self._script = deque(script)
        self.sent: list[Any] = []  # Any: messages of several types

    def has_message(self, timeout_s: float = 0.0) -> bool:
        first = self._script[0]
        if isinstance(first, StepPlan | Shutdown):
            return True
        self._script.popleft()
        first()
        return False

    def receive(self) -> StepPlan | Shutdown:
        message = self._script.popleft()
        assert isinstance(message, StepPlan | Shutdown)
        return message

    def send(self, message: object) -> None:
        self.sent.append(message)


def served(
    worker: CopyingWorker, *script: StepPlan | Shutdown | Callable[[], None], sends_outputs: bool
) -> list[object]:
    """Return what a rank sends."""
    channel = ScriptedChannel([*script, Shutdown()])
    serve_steps(worker, channel, ProgressWord(), RankLog(), sends_outputs=sends_outputs)  # type: ignore[arg-type]
    return channel.sent


def test_what_was_logged_is_sent_before_the_next_output() -> None:
    channel = ScriptedChannel([PLANS[0], _wait, Shutdown()])
    log, worker = RankLog(), CopyingWorker()
    log.handle(logging.makeLogRecord({"levelno": logging.WARNING, "msg": "The disk is full."}))
    worker.end_copies()
    serve_steps(worker, channel, ProgressWord(), log, sends_outputs=True)  # type: ignore[arg-type]
    assert channel.sent[0] == RankLogLine(logging.WARNING, "The disk is full.")
    assert isinstance(channel.sent[1], StepOutput)


@pytest.mark.parametrize("sends_outputs", [True, False])
def test_steps_are_acknowledged_in_order_once_their_copies_have_ended(
    *, sends_outputs: bool
) -> None:
    worker = CopyingWorker()
    sent = served(
        worker, PLANS[0], _wait, PLANS[1], _wait, worker.end_copies, sends_outputs=sends_outputs
    )
    outputs = [StepOutput(step, [], is_acknowledged=False) for step in range(2)]
    assert sent == (outputs if sends_outputs else []) + [StepAck(0), StepAck(1)]


@pytest.mark.parametrize("sends_outputs", [True, False])
def test_a_step_is_not_acknowledged_after_a_later_one(*, sends_outputs: bool) -> None:
    worker = CopyingWorker()
    launch = worker.launch

    def launch_and_end(plan: StepPlan) -> object:
        launched = launch(plan)
        if plan.step == 1:
            # The copies of step 0 end while the rank sends the output of step 1.
            output = launched.output
            launched.output = lambda: (worker.end_copies(), output())[1]  # type: ignore[func-returns-value, method-assign]
        return launched

    worker.launch = launch_and_end  # type: ignore[method-assign, assignment]
    sent = served(worker, PLANS[0], _wait, PLANS[1], sends_outputs=sends_outputs)
    steps = [one.step for one in sent if isinstance(one, StepAck) or one.is_acknowledged]  # type: ignore[attr-defined]
    assert steps == sorted(steps)
    assert steps[-1] == 1


def test_an_output_acknowledges_a_step_without_copies() -> None:
    worker = CopyingWorker()
    launch = worker.launch

    def launch_copied(plan: StepPlan) -> object:
        launched = launch(plan)
        launched.is_copied = True
        return launched

    worker.launch = launch_copied  # type: ignore[method-assign, assignment]
    assert served(worker, *PLANS, sends_outputs=True) == [StepOutput(step, []) for step in range(3)]


def test_a_rank_shows_which_step_it_copies_for() -> None:
    worker, progress = CopyingWorker(), ProgressWord()
    seen: list[int] = []

    def look() -> None:
        seen.append(RankReport.from_cells(progress.cells()).copying)

    def end_first() -> None:
        worker.steps[0].is_copied = True

    first, second, _ = PLANS
    channel = ScriptedChannel(
        [first, look, second, look, end_first, _wait, look, worker.end_copies, Shutdown()]
    )
    serve_steps(worker, channel, progress, RankLog(), sends_outputs=True)  # type: ignore[arg-type]
    look()
    assert seen == [1, 1, 2, 0]


def _wait() -> None:
    """Let the rank poll once."""


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
