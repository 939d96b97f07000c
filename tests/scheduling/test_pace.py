"""Prompts keep to a target of time between tokens."""

import pytest

from bench.scheduler.cases import decodes_beside_prompt
from pagedray.config import SchedulerConfig
from pagedray.errors import StartupError


def test_a_long_prompt_does_not_stop_decodes() -> None:
    # Steps are not linear in their tokens here, as the fit supposes.
    free, free_ttft_s = decodes_beside_prompt(itl_target_ms=None, num_prompt_tokens=40_000)
    paced, paced_ttft_s = decodes_beside_prompt(itl_target_ms=25.0, num_prompt_tokens=40_000)
    assert free[len(free) * 9 // 10] > 0.150
    assert paced[len(paced) * 99 // 100] < 0.030
    # Nor does it wait for long: steps are filled up to the target.
    assert paced[len(paced) // 2] > 0.020
    assert paced_ttft_s < 1.5 * free_ttft_s


def test_a_prompt_ends_although_decodes_take_longer_than_the_target() -> None:
    times, ttft_s = decodes_beside_prompt(itl_target_ms=1.0, num_prompt_tokens=4000)
    # 64 tokens are in each step, and another step was in flight when it arrived.
    num_steps = len(times) / 32
    assert 0 <= num_steps - 4000 / 64 <= 3
    assert ttft_s < 1.0


@pytest.mark.parametrize("target_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_targets_are_rejected(target_ms: float) -> None:
    with pytest.raises(StartupError, match="itl_target_ms must be above 0 and finite"):
        SchedulerConfig(itl_target_ms=target_ms)
