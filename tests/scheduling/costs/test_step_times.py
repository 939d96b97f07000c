"""The fit of step times, beside NumPy's least squares."""

import random

import numpy as np
import pytest

from cluster.scheduling.costs import StepTimes


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
