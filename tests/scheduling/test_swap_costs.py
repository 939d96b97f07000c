"""The choice between swapping and recomputing."""

from __future__ import annotations

import pytest

from cluster.scheduling.costs import StepTimes, SwapCosts, TierPolicy

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
    assert chooses_swap(costs, num_blocks=1, num_tokens=1)


def test_measurement_of_no_time_is_ignored() -> None:
    step_times = StepTimes()
    costs = SwapCosts(step_times)
    costs.note_swaps(10, 0.0)
    step_times.note_step(num_tokens=100, num_pairs=0, seconds=0.001)
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
    assert not policy.is_restored(20, first=0)
    assert policy.is_restored(30, first=0)
    assert not make_policy(copy_s=600e-6).is_restored(1000, first=0)


def test_everything_is_copied_without_costs() -> None:
    policy = TierPolicy(None, num_blocks=10, block_size=BLOCK_SIZE)
    assert num_saved(policy, range(1000)) == 1000
    assert policy.is_restored(1, first=0)
