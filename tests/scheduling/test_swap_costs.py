"""The choice between swapping and recomputing."""

import pytest

from cluster.scheduling.swap_costs import SwapCosts


def measured(*, blocks_per_s: float, tokens_per_s: float) -> SwapCosts:
    costs = SwapCosts()
    costs.note_swaps(10, 10 / blocks_per_s)
    costs.note_prefill(100, 100 / tokens_per_s)
    return costs


@pytest.mark.parametrize(("num_tokens", "is_swap"), [(100, False), (1000, True)])
def test_cheaper_option_is_chosen(num_tokens: int, is_swap: bool) -> None:
    # Twenty blocks out and in take 0.4 s; 100 tokens take 0.1 s, 1000 tokens take 1 s.
    costs = measured(blocks_per_s=100.0, tokens_per_s=1000.0)
    assert costs.choose_swap(num_blocks=20, num_tokens=num_tokens) is is_swap


def test_option_without_measurements_is_tried() -> None:
    costs = SwapCosts()
    assert costs.choose_swap(num_blocks=1, num_tokens=1)
    costs.note_prefill(100, 0.001)
    assert costs.choose_swap(num_blocks=1, num_tokens=1)


def test_measurement_of_no_time_is_ignored() -> None:
    costs = SwapCosts()
    costs.note_swaps(10, 0.0)
    costs.note_prefill(100, 0.001)
    assert costs.choose_swap(num_blocks=1, num_tokens=1)


def test_later_measurements_count_most() -> None:
    costs = measured(blocks_per_s=1000.0, tokens_per_s=100.0)
    assert costs.choose_swap(num_blocks=1, num_tokens=10)
    for _ in range(10):
        costs.note_swaps(10, 10.0)
    assert not costs.choose_swap(num_blocks=1, num_tokens=10)


def test_swapping_that_seemed_expensive_is_measured_again() -> None:
    costs = measured(blocks_per_s=1.0, tokens_per_s=1000.0)
    choices = [costs.choose_swap(num_blocks=1, num_tokens=10) for _ in range(100)]
    assert 0 < sum(choices) < 10
