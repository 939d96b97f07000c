"""Which steps and copies are measured."""

import pytest

from cluster.scheduling.costs import CostMeter, StepTimes, SwapCosts
from pagedray.batch import Decodes, SequencePlan, StepOutput, StepPlan

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
