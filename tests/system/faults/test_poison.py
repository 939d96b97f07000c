"""A request that kills its rank whenever it runs ends alone, on Ray and in this process."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
import pytest

from cluster.engine.engine_loop import EngineLoop
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.open_engine import open_engine
from pagedray.batch import StepPlan
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.fakes import RecordingSink, wait_for
from tests.small_models.checkpoints import CASES, save_checkpoint
from tests.system.engines import rank_processes

UNKNOWN_TOKEN = 10**6
"""The model has no such token, so that its rank dies. The validator would reject it."""
MAX_TOKENS = 40


class Rig:
    """An engine with one rank."""

    def __init__(self, folder: Path, executor: Literal["ray", "local"]) -> None:
        options = EngineOptions(executor=executor, device="cpu", num_threads=1, num_blocks=400)
        self.sink = RecordingSink()
        engine = open_engine(
            engine_config(str(folder), options), self.sink, lambda what, fraction: None
        )
        assert isinstance(engine, EngineLoop)
        self.engine = engine

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> None:
        self.sink.expect(name)
        self.engine.submit_request(
            Request(
                id=name,
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                seed=0,
            )
        )

    def ends(self) -> dict[str, object]:
        wait_for(lambda: not self.sink.num_open, timeout_s=240.0)
        return {name: ends[0] for (name, _), ends in self.sink.ends.items()}

    def tokens(self) -> dict[str, list[int]]:
        return {name: list(ids) for (name, _), ids in self.sink.tokens.items()}

    @property
    def num_deaths(self) -> int:
        return sum(self.engine.stats().replacements.values())


@pytest.fixture
def rig(tmp_path: Path, ray_cluster: None) -> Iterator[Rig]:
    save_checkpoint(CASES[0], tmp_path)
    rig = Rig(tmp_path, "ray")
    yield rig
    rig.engine.close()


@pytest.fixture
def local_rig(tmp_path: Path) -> Iterator[Rig]:
    save_checkpoint(CASES[0], tmp_path)
    rig = Rig(tmp_path, "local")
    yield rig
    rig.engine.close()


def prompts(number: int) -> dict[str, tuple[int, ...]]:
    return {f"r{i}": tuple(3 + n % 120 for n in range(i, 7 + 2 * i)) for i in range(number)}


def undisturbed(rig: Rig, given: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Return the tokens of requests without a fault."""
    for name, prompt in given.items():
        rig.submit(name, prompt)
    rig.ends()
    tokens = rig.tokens()
    rig.sink.tokens.clear()
    rig.sink.ends.clear()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 15, 63])
def test_poison_prompt_ends_and_others_get_their_tokens(rig: Rig, number: int) -> None:
    check_poison_prompt(rig, number)


def check_poison_prompt(rig: Rig, number: int) -> None:
    """Serve a poison among other requests."""
    given = prompts(number)
    expected = undisturbed(rig, given)
    for name, prompt in given.items():
        rig.submit(name, prompt)
    rig.submit("poison", (5, UNKNOWN_TOKEN, 6))
    ends = rig.ends()
    assert ends.pop("poison") is FinishReason.ERROR
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert rig.tokens() == expected | {"poison": []}
    assert rig.num_deaths <= 3 + math.ceil(math.log2(number + 1))
    assert rig.engine.is_healthy


def test_rank_in_this_process_survives_a_poison_prompt(local_rig: Rig) -> None:
    check_poison_prompt(local_rig, 15)


@pytest.mark.slow
def test_request_whose_later_token_kills_the_rank_ends_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prompts(7)
    expected = undisturbed(rig, given)
    kill_before_steps(rig, monkeypatch, "r3", length=len(given["r3"]) + 12)
    for name, prompt in given.items():
        rig.submit(name, prompt)
    ends = rig.ends()
    assert ends.pop("r3") is FinishReason.ERROR
    assert set(ends.values()) == {FinishReason.LENGTH}
    tokens = rig.tokens()
    poison = tokens.pop("r3")
    assert poison == expected.pop("r3")[: len(poison)]
    assert 5 <= len(poison) < MAX_TOKENS
    assert tokens == expected
    assert rig.num_deaths <= 3 + 3


@pytest.mark.slow
def test_deaths_that_no_request_causes_end_no_request(rig: Rig) -> None:
    given = {f"s{i}": prompt for i, prompt in enumerate(prompts(32).values())}
    for name, prompt in given.items():
        rig.submit(name, prompt, max_tokens=200)
    rig.ends()
    expected = rig.tokens()
    rig.sink.tokens.clear()
    rig.sink.ends.clear()
    for name, prompt in given.items():
        rig.submit(name, prompt, max_tokens=200)
    for number in range(1, 6):
        num_steps = rig.engine.stats().num_steps
        wait_for(lambda: rig.engine.stats().num_steps > num_steps + 20, timeout_s=60.0)  # noqa: B023
        for rank in rank_processes():
            rank.kill()
        wait_for(lambda: rig.num_deaths == number, timeout_s=60.0)  # noqa: B023
    assert set(rig.ends().values()) == {FinishReason.LENGTH}
    assert rig.tokens() == expected


@pytest.mark.slow
def test_three_deaths_in_a_row_end_no_request(rig: Rig) -> None:
    given = prompts(16)
    expected = undisturbed(rig, given)
    for name, prompt in given.items():
        rig.submit(name, prompt)
    for number in range(1, 4):
        wait_for(lambda: rig.engine._scheduler.in_flight_lengths(), timeout_s=60.0)
        for rank in rank_processes():
            rank.kill()
        wait_for(lambda: rig.num_deaths == number, timeout_s=60.0)  # noqa: B023
    assert set(rig.ends().values()) == {FinishReason.LENGTH}
    assert rig.tokens() == expected
    assert rig.engine.is_healthy


def kill_before_steps(rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str, *, length: int) -> None:
    """Kill the rank before each step in which a request has at least so many tokens."""
    executor = rig.engine._executor
    submit = executor.submit_plan

    def kill_and_submit(plan: StepPlan) -> None:
        running = rig.engine._scheduler.in_flight_lengths().get(name, {})
        if running.get(0, 0) >= length:
            ranks = rank_processes()
            for rank in ranks:
                rank.kill()
            # A rank that still runs could end the step.
            psutil.wait_procs(ranks, timeout=60.0)
        submit(plan)

    monkeypatch.setattr(executor, "submit_plan", kill_and_submit)
