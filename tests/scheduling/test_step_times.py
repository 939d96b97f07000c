"""The fit of step times, beside NumPy's least squares."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from cluster.scheduling.costs import StepPace, StepTimes

TARGET_S = 0.030
NUM_DECODES = 32
CONTEXT = 500
"""Tokens that each decode attends to."""


def steps(number: int) -> list[tuple[int, int]]:
    """Return numbers of tokens and pairs of steps, as decodes and chunks have them."""
    rng = random.Random(1)
    found = []
    for _ in range(number):
        num_tokens = rng.choice((1, 32, 64, 500, 2048))
        found.append((num_tokens, num_tokens * rng.randint(1, 8000)))
    return found


def test_the_three_times_are_found() -> None:
    times = StepTimes()
    for num_tokens, num_pairs in steps(200):
        seconds = 0.012 + 30e-6 * num_tokens + 2e-9 * num_pairs
        times.note_step(num_tokens=num_tokens, num_pairs=num_pairs, seconds=seconds)
    assert times.marginal_s(num_tokens=2048, num_pairs=0) == pytest.approx(61.4e-3, rel=0.01)
    assert times.marginal_s(num_tokens=0, num_pairs=10**6) == pytest.approx(2e-3, rel=0.01)


def test_noisy_steps_give_the_weighted_least_squares() -> None:
    times, rng = StepTimes(), random.Random(2)
    rows, seconds, weights = [], [], []
    for number, (num_tokens, num_pairs) in enumerate(steps(100)):
        found = (0.012 + 30e-6 * num_tokens + 2e-9 * num_pairs) * rng.uniform(0.8, 1.2)
        times.note_step(num_tokens=num_tokens, num_pairs=num_pairs, seconds=found)
        rows.append((1.0, num_tokens / 1e3, num_pairs / 1e6))
        seconds.append(found)
        weights.append(0.98 ** ((99 - number) / 2))
    scale = np.array(weights)
    expected = np.linalg.lstsq(np.array(rows) * scale[:, None], np.array(seconds) * scale)[0]
    assert times.marginal_s(num_tokens=1000, num_pairs=0) == pytest.approx(expected[1], rel=1e-3)
    assert times.marginal_s(num_tokens=0, num_pairs=10**6) == pytest.approx(expected[2], rel=1e-3)


def test_steps_of_one_kind_give_a_time_of_a_token() -> None:
    times = StepTimes()
    for _ in range(3):
        times.note_step(num_tokens=100, num_pairs=5000, seconds=0.02)
    assert times.marginal_s(num_tokens=1000, num_pairs=0) == pytest.approx(0.2, rel=1e-3)


def test_no_time_is_negative() -> None:
    times = StepTimes()
    for num_tokens, seconds in ((100, 0.03), (1000, 0.02), (2000, 0.01)):
        times.note_step(num_tokens=num_tokens, num_pairs=num_tokens, seconds=seconds)
    assert times.marginal_s(num_tokens=1000, num_pairs=1000) >= 0.0


@pytest.mark.parametrize("first_position", [0, 5000])
def test_tokens_within_a_time_take_at_most_that_time(first_position: int) -> None:
    times, rng = StepTimes(), random.Random(3)
    for _ in range(50):
        num_tokens, num_pairs = rng.randint(1, 2000), rng.randint(2000, 10**7)
        seconds = 0.01 + 3e-5 * num_tokens + 1e-8 * num_pairs
        times.note_step(num_tokens=num_tokens, num_pairs=num_pairs, seconds=seconds)

    def seconds_of(number: int) -> float:
        num_pairs = number * first_position + number * (number + 1) // 2
        return times.marginal_s(num_tokens=number, num_pairs=num_pairs)

    number = times.num_tokens_within(0.02, first_position=first_position)
    assert seconds_of(int(number)) <= 0.02 < seconds_of(int(number) + 1)
    assert times.step_s(num_tokens=0, num_pairs=0) == pytest.approx(0.01, rel=1e-3)
    assert times.num_tokens_within(-1.0, first_position=first_position) == 0


def step_s(num_tokens: int, num_pairs: int) -> float:
    return 0.010 + 20e-6 * num_tokens + 2e-9 * num_pairs


def pairs_of(first_position: int, num_tokens: int) -> int:
    """Return how many pairs the tokens of a prompt have from a position on, one by one."""
    return sum(range(first_position + 1, first_position + num_tokens + 1))


def make_pace(slowness: float = 1.0, *, target_s: float = TARGET_S) -> StepPace:
    """Return a pace that has seen steps of many sizes, all `slowness` times as slow at last."""
    times = StepTimes()
    for num_tokens in (1, 32, 200, 700, 1500, 2048):
        for context in (0, 1000, 8000):
            num_pairs = num_tokens * context
            seconds = step_s(num_tokens, num_pairs)
            times.note_step(num_tokens=num_tokens, num_pairs=num_pairs, seconds=seconds)
    pace = StepPace(target_s, times)
    for _ in range(20):
        pace.note_step(
            num_tokens=1000,
            num_pairs=10**6,
            num_prompt_tokens=1000,
            seconds=slowness * step_s(1000, 10**6),
        )
    return pace


def begin(pace: StepPace) -> None:
    pace.begin_step(num_tokens=NUM_DECODES, num_pairs=NUM_DECODES * CONTEXT)


@pytest.mark.parametrize("slowness", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("first_position", [0, 20_000])
def test_the_chunks_of_a_step_fill_its_target_together(
    slowness: float, first_position: int
) -> None:
    pace = make_pace(slowness)
    begin(pace)
    num_tokens, num_pairs = NUM_DECODES, NUM_DECODES * CONTEXT
    for start in (first_position, first_position + 3000):
        chunk = int(pace.num_tokens(start)) // (2 if start == first_position else 1)
        pace.add_tokens(chunk, first_position=start)
        num_tokens += chunk
        num_pairs += pairs_of(start, chunk)
    assert slowness * step_s(num_tokens, num_pairs) == pytest.approx(TARGET_S, rel=0.01)


def test_prompts_have_64_tokens_in_a_step_of_slow_decodes() -> None:
    pace = make_pace()
    pace.begin_step(num_tokens=2000, num_pairs=0)
    assert pace.num_tokens(0) == 64
    pace.add_tokens(50, first_position=0)
    assert pace.num_tokens(0) == 14
    pace.add_tokens(14, first_position=0)
    assert pace.num_tokens(0) == 0
    pace.begin_step(num_tokens=2000, num_pairs=0)
    assert pace.num_tokens(0) == 64


def test_a_step_has_at_most_twice_the_tokens_that_were_measured() -> None:
    pace = StepPace(1e6, StepTimes())
    begin(pace)
    assert pace.num_tokens(0) == 256
    pace.note_step(num_tokens=700, num_pairs=0, num_prompt_tokens=600, seconds=0.1)
    pace.note_step(num_tokens=300, num_pairs=0, num_prompt_tokens=250, seconds=0.1)
    begin(pace)
    assert pace.num_tokens(0) == 1200


def test_a_step_without_decodes_takes_any_time() -> None:
    pace = make_pace()
    begin(pace)
    pace.begin_step(num_tokens=0, num_pairs=0)
    assert pace.num_tokens(0) == math.inf
    pace.add_tokens(100_000, first_position=0)
    assert pace.num_tokens(100_000) == math.inf


@pytest.mark.parametrize(
    ("slowness", "bound", "target_s"), [(1000.0, 8.0, 0.2), (1e-3, 1 / 8, 0.002)]
)
def test_an_outlier_corrects_the_fit_eightfold_at_most(
    slowness: float, bound: float, target_s: float
) -> None:
    outlier, bounded = (make_pace(one, target_s=target_s) for one in (slowness, bound))
    begin(outlier)
    begin(bounded)
    assert outlier.num_tokens(0) == bounded.num_tokens(0)
