"""Measured times of steps and copies, and the choices that they decide."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from cluster.scheduling.costs import CostMeter, StepPace, StepTimes, SwapCosts, TierPolicy
from pagedray.batch import Decodes, SequencePlan, StepOutput, StepPlan

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


DECODES = Decodes.pack([1, 2], [10, 20])


class WatchedTimes(StepTimes):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int, float]] = []

    def note_step(self, *, num_tokens: int, num_pairs: int, seconds: float) -> None:
        self.steps.append((num_tokens, num_pairs, seconds))
        super().note_step(num_tokens=num_tokens, num_pairs=num_pairs, seconds=seconds)


def measured_steps(
    plans: list[StepPlan], *, forward_s: float = 0.5
) -> list[tuple[int, int, float]]:
    times = WatchedTimes()
    meter = CostMeter(times, SwapCosts(times), None)
    for plan in plans:
        meter.note_output(plan, StepOutput(plan.step, [], forward_s=forward_s))
    return times.steps


def test_step_with_a_prompt_is_measured_with_all_its_tokens() -> None:
    plan = StepPlan(7, [SequencePlan(0, 100, 4, is_sampled=True)], decodes=DECODES)
    # Tokens 100 to 103 attend to 101 to 104, those of the decodes to 11 and 21.
    num_pairs = 101 + 102 + 103 + 104 + 11 + 21
    assert measured_steps([plan]) == [(6, num_pairs, 0.5)]


def test_one_in_32_steps_without_a_prompt_is_measured() -> None:
    single = SequencePlan(0, 9, 1, is_sampled=True)
    plans = [StepPlan(step, [single], decodes=DECODES) for step in range(96)]
    assert measured_steps(plans) == [(3, 10 + 11 + 21, 0.5)] * 3


def test_step_of_unknown_duration_is_not_measured() -> None:
    plan = StepPlan(0, [SequencePlan(0, 0, 4, is_sampled=True)])
    assert measured_steps([plan], forward_s=0.0) == []


@pytest.mark.parametrize(("swap_s", "is_swapped"), [(0.001, True), (100.0, False)])
def test_copies_are_measured_whatever_the_step(swap_s: float, is_swapped: bool) -> None:
    times = StepTimes()
    costs = SwapCosts(times)
    meter = CostMeter(times, costs, None)
    prompt = StepPlan(0, [SequencePlan(0, 0, 1000, is_sampled=True)])
    meter.note_output(prompt, StepOutput(0, [], forward_s=1.0))
    meter.note_output(StepPlan(1, []), StepOutput(1, [], num_swapped=10, swap_s=swap_s))
    assert costs.choose_swap(num_blocks=5, first_position=0, num_tokens=100) is is_swapped


BLOCK_SIZE = 16


def measured(*, blocks_per_s: float, tokens_per_s: float) -> SwapCosts:
    step_times = StepTimes()
    costs = SwapCosts(step_times)
    costs.note_swaps(10, 10 / blocks_per_s)
    step_times.note_step(num_tokens=100, num_pairs=0, seconds=100 / tokens_per_s)
    return costs


def chooses_swap(costs: SwapCosts, *, num_blocks: int, num_tokens: int) -> bool:
    return costs.choose_swap(num_blocks=num_blocks, first_position=0, num_tokens=num_tokens)


@pytest.mark.parametrize(("num_tokens", "is_swap"), [(100, False), (1000, True)])
def test_cheaper_option_is_chosen(num_tokens: int, is_swap: bool) -> None:
    # Twenty blocks out and in take 0.4 s; 100 tokens take 0.1 s, 1000 tokens take 1 s.
    costs = measured(blocks_per_s=100.0, tokens_per_s=1000.0)
    assert chooses_swap(costs, num_blocks=20, num_tokens=num_tokens) is is_swap


def test_fixed_time_of_a_step_is_no_cost_of_its_tokens() -> None:
    step_times = StepTimes()
    costs = SwapCosts(step_times)
    costs.note_swaps(10, 10 * 0.2e-3)
    for num_tokens in (1, 30, 5, 64, 20) * 4:
        step_times.note_step(num_tokens=num_tokens, num_pairs=0, seconds=0.012 + 30e-6 * num_tokens)
    # Out and in, 128 blocks take 51 ms; 2 048 tokens take 61 ms, of steps that run anyway.
    assert chooses_swap(costs, num_blocks=128, num_tokens=2048)
    assert not chooses_swap(costs, num_blocks=128, num_tokens=1500)


def test_option_without_measurements_is_tried() -> None:
    step_times = StepTimes()
    costs = SwapCosts(step_times)
    assert chooses_swap(costs, num_blocks=1, num_tokens=1)
    step_times.note_step(num_tokens=100, num_pairs=0, seconds=0.001)
    # A measurement of no time is ignored.
    costs.note_swaps(10, 0.0)
    assert chooses_swap(costs, num_blocks=1, num_tokens=1)


def test_later_measurements_count_most() -> None:
    costs = measured(blocks_per_s=1000.0, tokens_per_s=100.0)
    assert chooses_swap(costs, num_blocks=1, num_tokens=10)
    for _ in range(10):
        costs.note_swaps(10, 10.0)
    assert not chooses_swap(costs, num_blocks=1, num_tokens=10)


def test_swapping_that_seemed_expensive_is_measured_again() -> None:
    costs = measured(blocks_per_s=1.0, tokens_per_s=1000.0)
    choices = [chooses_swap(costs, num_blocks=1, num_tokens=10) for _ in range(100)]
    assert 0 < sum(choices) < 10


def test_reads_are_chosen_if_they_take_less_time_than_computing_behind_those_under_way() -> None:
    # The step that it waits for takes no time here.
    costs = measured(blocks_per_s=100.0, tokens_per_s=1000.0)

    def chooses_read(num_tokens: int, *, num_reading: int = 0) -> bool:
        return costs.choose_read(
            num_blocks=20, num_reading=num_reading, first_position=0, num_tokens=num_tokens
        )

    # Nothing is known of the disk.
    assert chooses_read(1)
    costs.note_reads(10, 0.2)
    # Reading 20 blocks takes 0.4 s, copying them 0.2 s.
    assert not chooses_read(599)
    assert chooses_read(601)
    assert not chooses_read(601, num_reading=1)
    assert chooses_read(1001, num_reading=20)
    # One slow read does not rule it out forever.
    assert any(chooses_read(1) for _ in range(20))


def make_policy(*, copy_s: float, num_blocks: int = 1000) -> TierPolicy:
    """Return one for steps of 10 ms and 30 us a token, in which a block takes 480 us."""
    step_times = StepTimes()
    costs = SwapCosts(step_times)
    costs.note_swaps(1, copy_s)
    for num_tokens in (1, 500, 1000, 2000):
        step_times.note_step(num_tokens=num_tokens, num_pairs=0, seconds=10e-3 + num_tokens * 30e-6)
    return TierPolicy(costs, num_blocks=num_blocks, block_size=BLOCK_SIZE)


def num_saved(policy: TierPolicy, digests: range) -> int:
    return sum(policy.is_saved(str(number).encode()) for number in digests)


def test_blocks_that_are_never_found_again_are_no_longer_copied() -> None:
    policy = make_policy(copy_s=45e-6)
    assert num_saved(policy, range(1000)) == 1000
    assert num_saved(policy, range(1000, 20_000)) < 8000
    # A few are, so that copies are measured.
    assert num_saved(policy, range(20_000, 26_400)) == 100


def test_blocks_are_copied_again_once_those_that_were_not_are_looked_for() -> None:
    policy = make_policy(copy_s=45e-6)
    num_saved(policy, range(20_000))
    assert not policy.is_open
    # A third of the last ones.
    for number in range(19_000, 20_000, 3):
        policy.note_lookup(str(number).encode())
    for number in range(20_000, 30_000):
        policy.is_saved(str(number).encode())
        if number % 3 == 0:
            policy.note_lookup(str(number - 500).encode())
    assert policy.is_open


def test_a_block_that_the_pool_would_have_lost_does_not_count_as_found() -> None:
    policy = make_policy(copy_s=45e-6, num_blocks=10)
    for number in range(11):
        policy.note_lost(str(number).encode())
    assert not policy.note_lookup(b"0")
    assert policy.note_lookup(b"1")
    assert not policy.note_lookup(b"1")


def test_nothing_is_copied_if_a_copy_takes_longer_than_computing() -> None:
    policy = make_policy(copy_s=600e-6)
    for number in range(2000):
        policy.is_saved(str(number).encode())
        policy.note_lookup(str(number).encode())
    assert not policy.is_open


def test_many_blocks_are_copied_back_and_few_are_computed() -> None:
    # Copies make a sequence wait for a step of 10 ms, in which 20 blocks are computed.
    policy = make_policy(copy_s=45e-6)
    assert not policy.is_restored(20, first=0, end=20)
    assert policy.is_restored(30, first=0, end=30)
    assert not make_policy(copy_s=600e-6).is_restored(1000, first=0, end=1000)


def test_everything_is_copied_without_costs() -> None:
    policy = TierPolicy(None, num_blocks=10, block_size=BLOCK_SIZE)
    assert num_saved(policy, range(1000)) == 1000
    assert policy.is_restored(1, first=0, end=1)
