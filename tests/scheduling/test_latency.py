"""Tenants that were served least, and requests of high priority, start soon beside any flood."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.scheduler.cases import (
    FLOODS,
    FULL_STEP_S,
    Flood,
    decodes_beside_prompt,
    first_token_times,
)
from cluster.scheduling.kv_manager import KvOptions
from cluster.simulation.step_cost import LLAMA_8B_H200
from cluster.simulation.virtual_replica import VirtualReplica, distinct_prompt
from pagedray.config import SchedulerConfig
from pagedray.errors import StartupError
from tests.scheduling.harness import Harness


@pytest.fixture(scope="module")
def alone_s() -> float:
    """The longest time to first token without a flood."""
    return first_token_times("none", duration_s=8.0)[-1]


@pytest.mark.parametrize("flood", FLOODS)
def test_a_light_tenant_starts_soon_beside_a_flood(flood: Flood, alone_s: float) -> None:
    times = first_token_times(flood, duration_s=8.0)
    assert times[-1] <= 1.5 * alone_s + 2 * FULL_STEP_S


def make_crowd(*, tenant: str = "", priority: int = 0, num_blocks: int = 64) -> Harness:
    """Return a harness whose rows are all taken for long."""
    harness = Harness(
        block_size=4, num_blocks=num_blocks, num_cpu_blocks=32, max_num_seqs=4, max_model_len=60
    )
    for number in range(6):
        harness.add([number] * 6, tenant=tenant, priority=priority, max_tokens=40)
    harness.step()
    harness.step()
    return harness


def test_a_request_of_higher_priority_takes_the_row_of_a_lower_one() -> None:
    harness = make_crowd(priority=1)
    urgent = harness.add([9] * 6, priority=0, max_tokens=4)
    harness.step()
    assert harness.results.tokens[urgent, 0]
    # The last one that runs is preempted.
    assert [s.num_preemptions for s in harness.sequences[:6]] == [0, 0, 0, 1, 0, 0]
    harness.drain()


def test_a_request_of_higher_priority_gets_blocks_of_a_lower_one() -> None:
    harness = make_crowd(priority=1, num_blocks=16)
    urgent = harness.add([9] * 20, priority=0, max_tokens=4)
    for _ in range(4):
        harness.step()
    assert harness.results.tokens[urgent, 0]
    harness.drain()


def test_priority_preempts_a_sequence_three_times_at_most() -> None:
    harness = make_crowd(priority=1)
    for number in range(30):
        harness.add([10 + number] * 6, priority=0, max_tokens=4)
        for _ in range(6):
            harness.step()
    assert all(s.num_preemptions <= 3 for s in harness.sequences)
    # A protected one keeps its row.
    assert any(s.num_preemptions == 3 for s in harness.sequences)
    harness.drain()


def test_priority_takes_no_row_of_another_tenant() -> None:
    harness = make_crowd(tenant="one", priority=1)
    harness.scheduler._table.running[0].share.time = 0.0
    urgent = harness.add([9] * 6, tenant="two", priority=0, max_tokens=4)
    two = harness.sequences[-1].share
    two.time = 1000.0
    harness.step()
    assert not harness.results.tokens[urgent, 0]
    harness.drain()


def test_a_tenant_takes_rows_only_up_to_as_many_as_another_keeps() -> None:
    harness = make_crowd(tenant="many")
    for number in range(4):
        harness.add([10 + number] * 6, tenant="one", max_tokens=40)
    for _ in range(3):
        harness.step()
    rows = [s.share.tenant for s in harness.scheduler._table.running]
    assert sorted(rows) == ["many", "many", "one", "one"]
    # The displaced ones do not lose their protection.
    assert all(s.num_preemptions == 0 for s in harness.sequences)
    harness.drain()


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
