"""The controller over ranks with injected failures: each sequence ends exactly once."""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING

import pytest

from cluster.engine.controller import Controller
from cluster.engine.faults.death_budget import DeathBudget
from pagedray.config import EngineConfig
from pagedray.errors import (
    EngineError,
    LethalRequestError,
    ShuttingDownError,
    StartupError,
    WorkerError,
)
from pagedray.request import FinishReason, Request, SamplingParams
from tests.fakes import FakeExecutor, RecordingSink, unused_model, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagedray.batch import StepOutput, StepPlan
    from pagedray.request import Grammar


class Rig:
    """A controller with fake ranks and a recording sink."""

    def __init__(
        self, executor: FakeExecutor | None = None, *, first_pause_s: float = 0.001
    ) -> None:
        self.executor = FakeExecutor() if executor is None else executor
        self.sink = RecordingSink()
        budget = DeathBudget(
            max_barren=5, barren_s=0.0, first_pause_s=first_pause_s, max_pause_s=first_pause_s
        )
        self.controller = Controller(config(), self.executor, self.sink, death_budget=budget)

    def submit(
        self,
        request_id: str,
        *,
        n: int = 1,
        max_tokens: int = 5,
        num_prompt_tokens: int = 3,
        deadline_s: float | None = None,
        seed: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self.sink.expect(request_id, n)
        self.controller.submit_request(
            Request(
                id=request_id,
                prompt_token_ids=tuple(range(num_prompt_tokens)),
                sampling=SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True),
                seed=seed,
                deadline_s=deadline_s,
                grammar=grammar,
            )
        )

    def ends(self) -> dict[tuple[str, int], object]:
        """Return the end of each sequence, once all have one."""
        wait_for(lambda: not self.sink.num_open)
        assert all(len(ends) == 1 for ends in self.sink.ends.values())
        return {key: ends[0] for key, ends in self.sink.ends.items()}


class HeldGrammar:
    """Allows everything, as soon as its masks are no longer held back."""

    num_mask_bytes = 4
    error = ""
    is_costly = False
    is_free = False

    def __init__(self) -> None:
        self.is_held = True
        self.waits_s: list[float] = []

    def matcher(self, request: Request) -> HeldGrammar:
        return self

    def masks(
        self,
        asked: Sequence[tuple[HeldGrammar, Sequence[int]]],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        self.waits_s.append(wait_s)
        return [None if self.is_held else b"\xff" * 4] * len(asked)


def config() -> EngineConfig:
    return EngineConfig(model=unused_model(max_positions=200))


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
    assert (grammar.waits_s[0], grammar.waits_s[-1]) == (0.003, 0.02)


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

        def restart_ranks(self) -> None:
            healths.append(asked.controller.is_healthy)
            super().restart_ranks()

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
    with pytest.raises(EngineError, match="has stopped"):
        rig.submit("c")
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


class PoisonedExecutor(FakeExecutor):
    """Ranks that die when a row reaches the length at which its seed is poisonous."""

    def __init__(self, poisons: dict[int, int]) -> None:
        super().__init__()
        self.poisons = poisons
        """Lengths by seed."""
        self.num_deaths = 0
        self._seeds: dict[int, int] = {}
        self.num_running: list[int] = []

    def collect_output(self) -> StepOutput:
        plan = self._plans[0]
        self._seeds |= {start.row: start.seed for start in plan.starts}
        self.num_running.append(len(plan.sequences))
        for one in plan.sequences:
            if one.first_position + one.num_tokens == self.poisons.get(self._seeds[one.row]):
                self.num_deaths += 1
                raise WorkerError("A rank died.")
        return super().collect_output()


@pytest.mark.parametrize("length", [3, 4, 20])
@pytest.mark.parametrize(("number", "poison"), [(1, 0), (2, 1), (16, 0), (16, 9), (16, 15)])
def test_poison_ends_alone_within_the_bound(number: int, poison: int, length: int) -> None:
    # The engine's own request has seed 0.
    executor = PoisonedExecutor({poison + 1: length})
    rig = Rig(executor)
    for index in range(number):
        rig.submit(f"r{index}", max_tokens=30, seed=index + 1)
    rig.controller.start_steps()
    ends = rig.ends()
    assert ends.pop((f"r{poison}", 0)) is FinishReason.ERROR
    assert rig.sink.lethal == {(f"r{poison}", 0)}
    assert set(ends.values()) <= {FinishReason.LENGTH}
    assert all(rig.sink.tokens[key] == [7] * 30 for key in ends)
    assert executor.num_deaths <= 3 + math.ceil(math.log2(number))
    wait_for(lambda: rig.controller.is_healthy)
    assert rig.controller.stats().num_lethal_requests == 1
    rig.submit("later", seed=99, max_tokens=7)
    assert rig.ends()["later", 0] is FinishReason.LENGTH


def test_several_poisons_end_and_no_other_request(caplog: pytest.LogCaptureFixture) -> None:
    executor = PoisonedExecutor({2: 3, 3: 3, 11: 10, 20: 25})
    rig = Rig(executor)
    for seed in range(32):
        rig.submit(f"r{seed}", max_tokens=30, seed=seed, n=1 + seed % 3)
    rig.controller.start_steps()
    failed = {key[0] for key, end in rig.ends().items() if end is not FinishReason.LENGTH}
    assert failed == {"r2", "r3", "r11", "r20"}
    assert executor.num_deaths <= 4 * (4 + 5)
    ended = [r for r in caplog.records if "ended with an error" in r.getMessage()]
    assert len(ended) == 4


def test_requests_that_arrive_during_a_search_wait_and_finish() -> None:
    executor = PoisonedExecutor({3: 5})
    # The search lasts until the new request has arrived.
    executor.step_s = 0.01
    rig = Rig(executor)
    for seed in range(8):
        rig.submit(f"r{seed}", max_tokens=30, seed=seed)
    rig.controller.start_steps()
    wait_for(lambda: executor.num_deaths >= 2)
    rig.submit("new", max_tokens=30, seed=50)
    ends = rig.ends()
    assert ends.pop(("r3", 0)) is FinishReason.ERROR
    assert set(ends.values()) == {FinishReason.LENGTH}


def test_a_client_that_leaves_during_a_search_does_not_stop_it() -> None:
    executor = PoisonedExecutor({1: 5})
    rig = Rig(executor)
    for index in range(4):
        rig.submit(f"r{index}", max_tokens=30, seed=index + 1)
    rig.controller.start_steps()
    wait_for(lambda: executor.num_deaths >= 2)
    rig.controller.abort_request("r0")
    ends = rig.ends()
    assert ends.pop(("r0", 0)) in (FinishReason.ABORT, FinishReason.ERROR)
    assert set(ends.values()) == {FinishReason.LENGTH}


def test_lethal_request_that_is_sent_again_is_rejected() -> None:
    executor = PoisonedExecutor({1: 3})
    rig = Rig(executor)
    rig.submit("poison", seed=1)
    rig.controller.start_steps()
    assert rig.ends()["poison", 0] is FinishReason.ERROR
    with pytest.raises(LethalRequestError, match="Do not send it again"):
        rig.submit("again", seed=2)
    del rig.sink.ends["again", 0]
    rig.submit("other", num_prompt_tokens=5, seed=2)
    assert rig.ends()["other", 0] is FinishReason.LENGTH
    assert executor.num_deaths == 3


def test_ranks_that_always_die_blame_no_request() -> None:
    executor = PoisonedExecutor(dict.fromkeys(range(8), 4))
    executor.poisons[0] = 1  # The engine's own request, too.
    rig = Rig(executor)
    for seed in range(1, 8):
        rig.submit(f"r{seed}", seed=seed)
    rig.controller.start_steps()
    assert all(isinstance(end, EngineError) for end in rig.ends().values())


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
