"""The controller over ranks with injected failures: each sequence ends exactly once."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from cluster.engine.engine_loop import MaskPatience
from cluster.engine.watchdog import EngineClock
from pagedray.errors import EngineError, ShuttingDownError, StartupError, WorkerError
from pagedray.request import AskedMasks, FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.engine.controller_rig import Rig
from tests.fakes import FakeExecutor, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagedray.batch import StepOutput, StepPlan


class HeldGrammar:
    """Allows everything, as soon as its masks are no longer held back."""

    num_mask_bytes = 4
    error = ""
    is_costly = False
    is_free = False
    forced_ids = ()

    def __init__(self) -> None:
        self.is_held = True
        self.waits_s: list[float] = []

    def matcher(self, request: Request) -> HeldGrammar:
        return self

    def masks(
        self,
        asked: Sequence[AskedMasks],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        self.waits_s.append(wait_s)
        return [None if self.is_held else b"\xff" * 4] * len(asked)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.executor.may_step.set()
    rig.controller.stop_steps()


def test_every_sequence_ends_once_with_all_its_tokens(rig: Rig) -> None:
    rig.controller.start_steps()
    rig.submit("a")
    rig.submit("b", n=3, max_tokens=9)
    assert set(rig.ends().values()) == {FinishReason.LENGTH}
    assert rig.sink.tokens["a", 0] == [7] * 5
    assert [rig.sink.tokens["b", index] for index in range(3)] == [[7] * 9] * 3
    stats = rig.controller.stats()
    assert stats.num_generated_tokens >= 32
    assert sum(stats.step_times.counts) == stats.num_steps >= 9


def test_a_plan_is_sent_while_the_step_before_runs() -> None:
    class Counting(FakeExecutor):
        """Notes the most plans that ranks have at a time."""

        num_plans = 0

        def submit_plan(self, plan: StepPlan) -> None:
            super().submit_plan(plan)
            self.num_plans = max(self.num_plans, len(self._plans))

    ranks = Counting()
    rig = Rig(ranks)
    rig.controller.start_steps()
    rig.submit("a", max_tokens=9)
    rig.ends()
    assert ranks.num_plans == 2
    rig.controller.stop_steps()


def test_aborted_request_ends_once(rig: Rig) -> None:
    rig.submit("a", n=2)
    rig.submit("b")
    rig.controller.abort_request("a")
    rig.controller.abort_request("a")
    rig.controller.abort_request("unknown")
    rig.controller.start_steps()
    ends = rig.ends()
    assert ends["a", 0] is ends["a", 1] is FinishReason.ABORT
    assert ends["b", 0] is FinishReason.LENGTH


def test_masks_that_are_late_delay_no_other_request(rig: Rig) -> None:
    grammar = HeldGrammar()
    rig.submit("late", grammar=grammar)
    rig.controller.start_steps()
    rig.submit("a")
    wait_for(lambda: rig.sink.ends["a", 0])
    assert rig.sink.tokens["a", 0] == [7] * 5
    assert not rig.sink.tokens["late", 0]
    # It waits for the mask alone, which is no hang.
    wait_for(lambda: not rig.controller._has_work)
    grammar.is_held = False
    assert set(rig.ends().values()) == {FinishReason.LENGTH}
    assert rig.sink.tokens["late", 0] == [7] * 5


def test_masks_are_awaited_for_longer_beside_longer_steps(rig: Rig) -> None:
    grammar = HeldGrammar()
    grammar.is_held = False
    rig.executor.step_s = 0.05
    rig.submit("a", grammar=grammar)
    rig.controller.start_steps()
    assert rig.ends() == {("a", 0): FinishReason.LENGTH}
    assert (grammar.waits_s[1], grammar.waits_s[-1]) == (0.003, 0.02)


class StillClock(EngineClock):
    """A clock by which steps take no time, however busy the machine."""

    def now_s(self) -> float:
        return 0.0


def test_a_request_alone_waits_longer_for_its_first_mask() -> None:
    # So that the last token of its prompt is not computed twice, in batches of other sizes.
    rig = Rig(clock=StillClock())
    grammar = HeldGrammar()
    grammar.is_held = False
    rig.submit("a", grammar=grammar)
    rig.controller.start_steps()
    rig.ends()
    rig.controller.stop_steps()
    assert grammar.waits_s == [0.02] + [0.003] * 4


def test_a_request_among_others_does_not_wait_longer_for_its_first_mask(rig: Rig) -> None:
    grammar = HeldGrammar()
    grammar.is_held = False
    rig.submit("a", grammar=grammar)
    rig.submit("b")
    rig.controller.start_steps()
    rig.ends()
    assert grammar.waits_s[0] == 0.003


def test_request_with_a_late_mask_is_aborted_at_its_deadline(rig: Rig) -> None:
    rig.submit("late", grammar=HeldGrammar(), deadline_s=time.monotonic() + 0.02)
    rig.controller.start_steps()
    assert rig.ends() == {("late", 0): FinishReason.ABORT}


def test_request_ends_at_its_deadline(rig: Rig) -> None:
    rig.executor.may_step.clear()
    rig.controller.start_steps()
    rig.submit("a", deadline_s=time.monotonic() + 0.02)
    time.sleep(0.03)
    rig.executor.may_step.set()
    assert rig.ends() == {("a", 0): FinishReason.ABORT}


@pytest.mark.parametrize("where", ["submit_failures", "step_failures"])
def test_requests_continue_after_the_death_of_a_rank(rig: Rig, where: str) -> None:
    getattr(rig.executor, where).append(WorkerError("A rank died."))
    rig.submit("a", n=2)
    rig.submit("b")
    rig.controller.start_steps()
    assert set(rig.ends().values()) == {FinishReason.LENGTH}
    assert rig.sink.tokens["a", 1] == [7] * 5
    assert rig.executor.num_restarts == 1
    assert rig.controller.is_healthy


def test_an_engine_is_not_healthy_while_ranks_are_replaced() -> None:
    healths: list[bool] = []

    class Asking(FakeExecutor):
        """Notes the health of its engine while ranks start."""

        def restart_ranks(self) -> bool:
            healths.append(asked.controller.is_healthy)
            return super().restart_ranks()

    asked = Rig(Asking())
    asked.executor.step_failures.append(WorkerError("A rank died."))
    asked.submit("a")
    asked.controller.start_steps()
    assert asked.ends() == {("a", 0): FinishReason.LENGTH}
    assert healths == [False]
    assert asked.controller.is_healthy
    asked.controller.stop_steps()


def test_replacement_that_dies_is_replaced_again(rig: Rig) -> None:
    rig.executor.step_failures.append(WorkerError("A rank died."))
    rig.executor.restart_failures += [WorkerError("So did the next."), WorkerError("And another.")]
    rig.submit("a")
    rig.controller.start_steps()
    assert rig.ends() == {("a", 0): FinishReason.LENGTH}
    assert rig.executor.num_restarts == 3
    assert rig.controller.is_healthy


def test_engine_gives_up_when_every_replacement_dies(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.executor.step_failures.append(WorkerError("A rank died."))
    rig.executor.restart_failures += [WorkerError("No luck.")] * 10
    rig.submit("a", n=2)
    rig.submit("b")
    rig.controller.start_steps()
    (error,) = set(map(str, rig.ends().values()))
    pattern = (
        r"The engine has stopped: its ranks died 5 times in \d+ s without .* a step\. No luck\."
    )
    assert re.fullmatch(pattern, error)
    assert not rig.controller.is_healthy
    depths = []
    for _ in range(2):
        with pytest.raises(EngineError, match="has stopped") as caught:
            rig.submit("c")
        depths.append(len(caught.traceback))
    # Frames of earlier calls, and the requests in them, are not kept.
    assert depths[0] == depths[1]
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


def test_ranks_that_cannot_start_are_not_tried_again(rig: Rig) -> None:
    rig.executor.step_failures.append(WorkerError("A rank died."))
    rig.executor.restart_failures.append(StartupError("No checkpoint."))
    rig.submit("a")
    rig.controller.start_steps()
    assert str(rig.ends()["a", 0]) == "The engine has stopped: No checkpoint."
    assert rig.executor.num_restarts == 1


def test_engine_gives_up_after_deaths_without_a_step_between(rig: Rig) -> None:
    rig.executor.step_failures += [WorkerError("A rank died.")] * 100
    rig.submit("a")
    rig.submit("b")
    rig.controller.start_steps()
    errors = rig.ends().values()
    assert all(isinstance(error, EngineError) for error in errors)
    assert {error.retry_after_s for error in errors if isinstance(error, EngineError)} == {10.0}
    assert rig.executor.num_restarts >= 4


class MortalExecutor(FakeExecutor):
    """Ranks that die at every tenth step."""

    num_collected = 0

    def collect_output(self) -> StepOutput:
        self.num_collected += 1
        if self.num_collected % 10 == 0:
            raise WorkerError("A rank died.")
        return super().collect_output()


def test_deaths_with_steps_between_end_no_request() -> None:
    rig = Rig(MortalExecutor())
    for number in range(8):
        rig.submit(f"r{number}", max_tokens=150)
    rig.controller.start_steps()
    assert set(rig.ends().values()) == {FinishReason.LENGTH}
    assert all(tokens == [7] * 150 for tokens in rig.sink.tokens.values())
    assert rig.executor.num_restarts >= 12
    rig.controller.stop_steps()


def test_defect_ends_every_request(rig: Rig) -> None:
    rig.executor.step_failures.append(RuntimeError("a defect"))
    rig.submit("a")
    rig.controller.start_steps()
    assert str(rig.ends()["a", 0]) == "The engine failed; see the server log."


def test_shutdown_ends_running_and_waiting_requests(rig: Rig) -> None:
    rig.executor.may_step.clear()
    rig.controller.start_steps()
    rig.submit("a", n=2, max_tokens=150)
    rig.submit("b", max_tokens=150)
    rig.controller.stop_steps(timeout_s=0.05)
    assert all(isinstance(end, ShuttingDownError) for end in rig.ends().values())
    with pytest.raises(ShuttingDownError):
        rig.controller.submit_request(
            Request(id="c", prompt_token_ids=(1,), sampling=SamplingParams(), seed=0)
        )


def test_step_that_ends_after_the_shutdown_adds_nothing(rig: Rig) -> None:
    rig.executor.may_step.clear()
    rig.submit("a", max_tokens=1)
    rig.controller.start_steps()
    rig.controller.stop_steps(timeout_s=0.05)
    rig.executor.may_step.set()
    rig.controller.stop_steps()
    rig.controller.abort_request("a")
    assert isinstance(rig.ends()["a", 0], ShuttingDownError)
    assert rig.sink.tokens["a", 0] == []


def test_shutdown_does_not_wait_for_a_replacement(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(first_pause_s=600.0)
    rig.executor.step_failures.append(WorkerError("A rank died."))
    rig.executor.restart_failures += [WorkerError("So did the next."), WorkerError("And it, too.")]
    rig.submit("a")
    rig.controller.start_steps()
    wait_for(lambda: rig.executor.num_restarts == 2)
    started_s = time.monotonic()
    rig.controller.stop_steps()
    assert time.monotonic() - started_s < 60.0
    assert isinstance(rig.ends()["a", 0], ShuttingDownError)
    assert "ERROR" not in [record.levelname for record in caplog.records]


def test_replacement_is_logged_in_two_lines(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cluster")
    rig.executor.step_failures.append(WorkerError("A rank died."))
    rig.submit("a")
    rig.controller.start_steps()
    rig.ends()
    wait_for(lambda: rig.controller.is_healthy)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0] == "A rank died. Replacing ranks; 1 request is waiting."
    assert messages[1].startswith("All ranks are ready again after")


def test_a_controller_without_finite_logits_is_not_healthy_until_there_are(rig: Rig) -> None:
    rig.controller.start_steps()
    rig.executor.token_id = -1
    for request_id in "abc":
        rig.submit(request_id, n=2)
    assert set(rig.ends().values()) == {FinishReason.ERROR}
    wait_for(lambda: not rig.controller.is_healthy)
    rig.executor.token_id = 7
    wait_for(lambda: rig.controller.is_healthy)
    assert set(rig.sink.ends) == {(request_id, index) for request_id in "abc" for index in (0, 1)}
    assert rig.controller.error is None


def test_the_wait_follows_the_duration_of_steps_within_bounds() -> None:
    patience = MaskPatience()
    waits = []
    for step_s in (0.001, 0.012, 5.0):
        patience.note_step(step_s)
        waits.append(patience.wait_s(delays_others=True))
    assert waits == pytest.approx([0.003, 0.009, 0.02])


def test_steps_that_wait_for_masks_do_not_extend_the_wait() -> None:
    patience = MaskPatience()
    # Masks that always arrive just in time, beside a step of 1 ms.
    for _ in range(100):
        patience.note_step(patience.wait_s(delays_others=True) + 0.001)
    assert patience.wait_s(delays_others=True) <= 0.0031
    # Nor do steps whose masks are late.
    patience.note_masks(may_delay_step=True)
    patience.note_step(0.02)
    assert patience.wait_s(delays_others=True) <= 0.0031


def test_a_wait_that_delays_no_other_sequence_is_as_long_as_any() -> None:
    patience = MaskPatience()
    patience.note_step(0.001)
    assert patience.wait_s(delays_others=False) == 0.02
