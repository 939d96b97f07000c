"""The controller finds the requests that kill ranks, and ends no other."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import pytest

from pagedray.errors import (
    EngineError,
    LethalRequestError,
    WorkerError,
)
from pagedray.request import FinishReason
from tests.engine.controller_rig import Rig
from tests.fakes import FakeExecutor, wait_for

if TYPE_CHECKING:
    from pagedray.batch import StepOutput


class PoisonedExecutor(FakeExecutor):
    """Ranks that die when a row reaches the length at which its seed is poisonous.

    They also die when a row runs in a step after their start in which its seed is poisonous.
    """

    def __init__(self, poisons: dict[int, int], lethal_steps: dict[int, int] | None = None) -> None:
        super().__init__()
        self.poisons = poisons
        """Lengths by seed."""
        self.lethal_steps = lethal_steps or {}
        """Steps by seed, from 1."""
        self.num_deaths = 0
        self._seeds: dict[int, int] = {}
        self.num_running: list[int] = []

    def collect_output(self) -> StepOutput:
        plan = self._plans[0]
        self._seeds |= {start.row: start.seed for start in plan.starts}
        self.num_running.append(len(plan.sequences))
        for one in plan.sequences:
            seed = self._seeds[one.row]
            is_lethal_step = plan.step + 1 >= self.lethal_steps.get(seed, sys.maxsize)
            if is_lethal_step or one.first_position + one.num_tokens == self.poisons.get(seed):
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


@pytest.mark.parametrize("step", range(1, 11))
@pytest.mark.parametrize(("number", "poisons"), [(1, [0]), (32, [31]), (32, [3, 20])])
def test_poison_that_kills_some_steps_after_each_start_ends_alone(
    number: int, poisons: list[int], step: int
) -> None:
    executor = PoisonedExecutor({}, {poison + 1: step for poison in poisons})
    rig = Rig(executor)
    for index in range(number):
        rig.submit(f"r{index}", max_tokens=100, seed=index + 1)
    rig.controller.start_steps()
    ends = rig.ends()
    failed = {name for (name, _), end in ends.items() if end is not FinishReason.LENGTH}
    assert failed == {f"r{poison}" for poison in poisons}
    assert executor.num_deaths <= len(poisons) * (4 + math.ceil(math.log2(number)))


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
