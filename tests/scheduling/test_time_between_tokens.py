"""Prompts keep to a target of time between tokens."""

from itertools import pairwise

import pytest

from bench.scheduler.cases import decodes_beside_prompt
from cluster.scheduling.kv_manager import KvOptions
from cluster.simulation.step_cost import LLAMA_8B_H200
from cluster.simulation.virtual_replica import VirtualReplica, distinct_prompt
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


def test_many_short_prompts_keep_to_the_target_together() -> None:
    replica = VirtualReplica(
        SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=8192, itl_target_ms=25.0),
        KvOptions(block_size=16, num_blocks=5000, num_cpu_blocks=0),
        LLAMA_8B_H200,
        max_model_len=2000,
    )
    decodes = [
        replica.submit(distinct_prompt(number, 200), num_output_tokens=1000) for number in range(32)
    ]
    prompts = [
        replica.submit(distinct_prompt(number, 400), num_output_tokens=1, arrival_s=1.0)
        for number in range(32, 72)
    ]
    while any(prompt.end_s is None for prompt in prompts):
        replica.run(num_steps=1)
    # One of them takes less time than the target, and all of them together 0.3 s.
    pairs = pairwise(decodes[0].token_times_s)
    assert max(later_s - earlier_s for earlier_s, later_s in pairs if later_s > 1.0) < 0.030


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
