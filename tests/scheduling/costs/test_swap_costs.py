"""The choice between swapping and recomputing."""

import pytest

from cluster.scheduling.costs import StepTimes, SwapCosts


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
