"""Tenants that were served least, and requests of high priority, start soon beside any flood."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from bench.scheduler.cases import (
    FLOODS,
    FULL_STEP_S,
    Flood,
    decodes_beside_prompt,
    first_token_times,
)
from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.sequence import Held, Queued, Running, Sequence, Swapped, Waiting
from cluster.scheduling.speculation import Speculator
from cluster.simulation.step_cost import LLAMA_8B_H200
from cluster.simulation.virtual_replica import (
    EOS,
    VirtualCall,
    VirtualDrafter,
    VirtualReplica,
    distinct_prompt,
)
from pagedray.config import SchedulerConfig, SpeculationConfig
from pagedray.errors import StartupError
from tests.scheduling.harness import Harness
from tests.slow_params import some_slow


def make_harness(**changes: int) -> Harness:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 64} | changes
    return Harness(block_size=4, num_cpu_blocks=16, max_model_len=64, **limits)  # type: ignore[arg-type]  # the stubs are narrower than the library


def num_steps_until_started(harness: Harness, request_id: str) -> int:
    for num_steps in range(1, 2000):
        harness.step()
        if harness.results.tokens[request_id, 0]:
            return num_steps
    raise AssertionError("The request never starts.")


def test_one_request_does_not_wait_for_a_hundred_of_another_tenant() -> None:
    alone = make_harness()
    flooded, crowded = make_harness(), make_harness()
    for _ in range(100):
        flooded.add([1] * 8, tenant="many", max_tokens=8)
        crowded.add([1] * 8, tenant="one", max_tokens=8)
    for harness in (flooded, crowded):
        harness.step()
    prompt = [2] * 8
    expected = num_steps_until_started(alone, alone.add(prompt, tenant="one"))
    fair = num_steps_until_started(flooded, flooded.add(prompt, tenant="one"))
    in_line = num_steps_until_started(crowded, crowded.add(prompt, tenant="one"))
    # It waits for one of the four rows, for at most 8 tokens.
    assert fair <= expected + 10
    # Behind a flood of its own tenant it waits for all of it.
    assert in_line > 150
    flooded.drain()


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_get_tokens_by_weight(weight: float) -> None:
    harness = make_harness(max_num_seqs=2)
    ids: dict[str, list[str]] = {"light": [], "heavy": []}
    for number in range(60):
        tenant = ("light", "heavy")[number % 2]
        # Longer requests are no advantage.
        length = 4 if tenant == "light" else 8
        ids[tenant].append(
            harness.add(
                [number] * length,
                tenant=tenant,
                max_tokens=length,
                weight=weight if tenant == "heavy" else 1.0,
            )
        )
    for _ in range(75):
        harness.step()
    served = {
        tenant: sum(len(harness.results.tokens[one, 0]) for one in own)
        for tenant, own in ids.items()
    }
    assert all(served.values())
    assert served["heavy"] / served["light"] == pytest.approx(weight, rel=0.2)
    harness.drain()


def test_room_is_taken_from_the_tenant_that_was_served_most() -> None:
    harness = make_harness(num_blocks=12, max_num_seqs=3)
    first = harness.add([1] * 8, tenant="many", max_tokens=30)
    second = harness.add([2] * 8, tenant="many", max_tokens=30)
    last = harness.add([3] * 8, tenant="one", max_tokens=12)
    for _ in range(60):
        harness.step()
        preemptions = {s.request_id: s.num_preemptions for s in harness.sequences}
        if any(preemptions.values()):
            break
    assert preemptions == {first: 0, second: 1, last: 0}
    harness.drain()


def test_no_sequence_is_preempted_for_one_that_shares_a_prompt() -> None:
    harness = Harness(
        block_size=4, num_blocks=53, num_cpu_blocks=100, max_num_seqs=16, preemption="swap"
    )
    for token_id in range(10):
        harness.add([token_id] * 4, tenant="many", max_tokens=90)
    for _ in range(8):
        harness.step()
    harness.add([10] * 60, tenant="one", n=2, max_tokens=20, weight=100.0)
    first, second = harness.sequences[-2:]
    while isinstance(second.state, Held):
        harness.step()
    assert isinstance(first.state, Running)
    num_swapped = harness.scheduler.stats().num_swapped
    harness.step()
    assert isinstance(second.state, Waiting)
    # Its tenant may take a row, but it needs two blocks and the others have two or three each.
    assert harness.scheduler.stats().num_swapped == num_swapped
    harness.drain()


def test_long_prompts_that_take_rows_in_the_same_step_share_its_tokens() -> None:
    harness = make_harness()
    for _ in range(4):
        harness.add([1] * 4, tenant="many", max_tokens=40)
    for _ in range(6):
        harness.step()
    for token_id in (2, 3):
        harness.add([token_id] * 40, tenant="one")
    harness.step()
    plan = harness.plan()
    # Two of the sixteen tokens are decodes. The first prompt leaves one for the second.
    assert [chunk.num_tokens for chunk in plan.chunks] == [13, 1]
    harness.settle()
    harness.drain()


def test_long_prompts_of_two_tenants_are_computed_in_turn() -> None:
    harness = Harness(max_num_batched_tokens=16)
    for tenant in ("one", "two"):
        harness.add([1] * 90, tenant=tenant)
        harness.step()
    for _ in range(6):
        harness.step()
        one, two = (sequence.num_computed for sequence in harness.sequences)
        assert 0 <= one - two <= 32
    assert one + two == 8 * 16
    harness.drain()


@pytest.mark.parametrize(("num_tokens", "num_preempted"), [(28, 1), (40, 0)])
def test_blocks_of_another_tenant_are_taken_for_no_more_than_half_of_the_pool(
    num_tokens: int, num_preempted: int
) -> None:
    harness = Harness(block_size=4, num_blocks=16, max_num_seqs=4, enable_prefix_cache=False)
    for _ in range(3):
        harness.add([1] * 8, tenant="many", max_tokens=24)
    for _ in range(4):
        harness.step()
    # A row is free.
    harness.add([2] * num_tokens, tenant="one", max_tokens=1)
    for _ in range(2):
        harness.step()
    assert sum(isinstance(one.state, Queued) for one in harness.sequences[:3]) == num_preempted
    harness.drain()


@pytest.mark.parametrize(("num_waiting", "num_others"), [(8, 64 // 4), (9, 90 - 64)])
def test_a_step_that_ends_a_prompt_is_short_unless_many_of_its_tenant_wait(
    num_waiting: int, num_others: int
) -> None:
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=100)
    harness.add([1] * 90, tenant="long")
    harness.step()
    for number in range(1 + num_waiting):
        harness.add([number] * 6, tenant="short", max_tokens=1)
    plan = harness.plan()
    assert [sequence.num_tokens for sequence in plan.sequences] == [6, num_others]
    harness.drain()


def test_a_prompt_costs_its_tenant_the_same_in_chunks() -> None:
    times = []
    for max_num_batched_tokens in (16, 64):
        harness = make_harness(max_num_batched_tokens=max_num_batched_tokens)
        harness.add([1] * 40, tenant="one", max_tokens=2, weight=2.0)
        (sequence,) = harness.sequences
        harness.drain()
        times.append(sequence.share.time)
    # Of two tokens, the second is not computed, but each is served.
    assert times == [(40 + 2) / 2] * 2


def test_none_starts_in_blocks_that_are_swapped_out_for_another() -> None:
    harness = Harness(
        num_blocks=20, num_cpu_blocks=16, preemption="swap", enable_prefix_cache=False
    )
    for token_id in (1, 2):
        harness.add([token_id] * 24, tenant="many", max_tokens=12)
    harness.step()
    harness.add([3] * 34, tenant="one", max_tokens=2)
    harness.add([4] * 2, tenant="many", max_tokens=2)
    *_, victim, large, small = harness.sequences
    while not isinstance(victim.state, Swapped):
        harness.step()
        assert isinstance(large.state, Waiting)
        assert isinstance(small.state, Waiting)
    harness.step()
    assert isinstance(large.state, Running)
    harness.drain()


def test_recomputation_after_a_death_costs_a_tenant_nothing() -> None:
    harness = make_harness()
    for tenant in ("one", "other"):
        harness.add([1] * 8, tenant=tenant, max_tokens=20)
    for _ in range(4):
        harness.step()
    before = {s.request_id: s.share.time for s in harness.sequences}
    assert all(before.values())
    harness.replace_worker()
    harness.schedule()
    assert all(isinstance(s.state, Running) for s in harness.sequences)
    assert {s.request_id: s.share.time for s in harness.sequences} == before
    harness.drain()


@pytest.fixture(scope="module")
def alone_s() -> float:
    """The longest time to first token without a flood."""
    return first_token_times("none", duration_s=8.0)[-1]


@pytest.mark.parametrize("flood", some_slow(FLOODS, slow=FLOODS[2:]))
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
    # The preempted ones do not lose their protection.
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


class OnesDrafter(VirtualDrafter):
    """Guesses the tokens of one tenant well, and the tokens of others always wrong."""

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        if sequence.active.request.tenant != "one":
            return [EOS] * limit
        return super().propose(sequence, limit)


def test_tenants_get_as_many_tokens_whether_their_drafts_are_right_or_wrong() -> None:
    length = 300
    replica = VirtualReplica(
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
        # Blocks for eight sequences.
        KvOptions(block_size=16, num_blocks=8 * 21, num_cpu_blocks=0),
        LLAMA_8B_H200,
        max_model_len=1000,
        speculator=Speculator(
            SpeculationConfig(num_speculative_tokens=4), OnesDrafter(acceptance=0.9)
        ),
    )
    tenants = ("one", "other")
    calls = {tenant: list[VirtualCall]() for tenant in tenants}
    for number in range(300):
        tenant = tenants[number % 2]
        prompt = distinct_prompt(number, 16)
        calls[tenant].append(replica.submit(prompt, num_output_tokens=length, tenant=tenant))
    replica.run(num_steps=1500)
    assert replica.has_work
    one, other = (sum(call.num_tokens for call in calls[tenant]) for tenant in tenants)
    assert one / other == pytest.approx(1.0, abs=0.05)
    stats = replica.scheduler.stats().speculation
    assert stats.num_accepted_tokens > 0.3 * one

    def median_s(tenant: str) -> float:
        """Return how long an ended request of a tenant took from its first token on."""
        ended = [call for call in calls[tenant] if call.end_s is not None]
        return median(call.token_times_s[-1] - call.token_times_s[0] for call in ended)

    # Some requests are preempted.
    assert median_s("one") < 0.75 * median_s("other")
