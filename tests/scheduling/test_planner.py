"""Forks and preemption, seen from the plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.scheduler.cases import WORKLOADS, Workload, throughput_of_pool, throughput_of_preemption
from cluster.scheduling.sequence import Arriving, Held, Swapped, Waiting
from pagedray.batch import BlockCopy, StepPlan
from pagedray.request import FinishReason
from tests.scheduling.fake_worker import known_tokens
from tests.scheduling.harness import Harness
from tests.slow_params import some_slow

if TYPE_CHECKING:
    from pagedray.config import Preemption

SLOW: tuple[Workload, ...] = ("shared prefix", "long prompts", "forks")


def crowded(preemption: Preemption, *, num_cpu_blocks: int = 8) -> Harness:
    """Return a harness with two sequences for which the pool is too small."""
    harness = Harness(
        block_size=4, num_blocks=6, num_cpu_blocks=num_cpu_blocks, preemption=preemption
    )
    harness.add([1] * 6, max_tokens=16)
    harness.add([2] * 6, max_tokens=16)
    return harness


def run_until_preemption(harness: Harness) -> StepPlan:
    """Return the plan that takes a row from the second sequence, without running it."""
    while True:
        plan = harness.plan()
        if any(sequence.num_preemptions for sequence in harness.sequences):
            return plan
        harness.settle()


def test_many_siblings_of_a_long_prompt_start_in_several_plans() -> None:
    num_tokens = 2**18
    harness = Harness(
        block_size=256,
        num_blocks=num_tokens // 256 + 40,
        max_model_len=2 * num_tokens,
        max_num_batched_tokens=2 * num_tokens,
        max_num_seqs=10,
    )
    harness.add([1] * num_tokens, n=10, max_tokens=20)
    num_starts: list[int] = []
    while sum(num_starts) < 10:
        plan = harness.plan()
        num_starts.append(len(plan.starts))
        harness.settle()
    assert num_starts == [1, 2, 2, 2, 2, 1]


def test_siblings_share_full_prompt_blocks_and_copy_the_last() -> None:
    harness = Harness(block_size=4)
    harness.add([1] * 6, n=3)
    first = harness.plan()
    assert len(first.starts) == 1
    second = harness.plan()
    leader = harness.sequences[0]
    # Neither their tokens nor the blocks that they share are sent again.
    tables = [start.block_ids for start in second.starts]
    assert tables == [sibling.blocks.ids[1:2].tolist() for sibling in harness.sequences[1:]]
    assert all(sibling.blocks.ids[0] == leader.blocks.ids[0] for sibling in harness.sequences)
    starts = [(start.donor_row, start.token_ids) for start in second.starts]
    assert starts == [(leader.state.row, b"")] * 2
    assert second.copies == [BlockCopy(leader.blocks.ids[1], table[0]) for table in tables]
    assert [s.first_position for s in second.sequences] == [5, 5, 6]
    harness.drain()


def test_siblings_wait_for_the_last_chunk_of_the_prompt() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.add([1] * 9, n=2)
    for _ in range(3):
        plan = harness.plan()
        assert len(plan.sequences) == 1
        harness.settle()
    plan = harness.plan()
    assert len(plan.starts) == 1


@pytest.mark.parametrize("index", [0, 2])
def test_siblings_start_by_themselves_only_if_the_first_is_finished(index: int) -> None:
    harness = Harness(max_num_batched_tokens=4, enable_prefix_cache=False)
    request_id = harness.add([1] * 9, n=3)
    harness.step()
    harness.finish(request_id, index)
    assert isinstance(harness.sequences[1].state, Waiting if index == 0 else Held)
    plan = harness.plan()
    assert plan.copies == []
    assert [s.first_position for s in plan.sequences] == [0 if index == 0 else 4]
    harness.drain()


def test_siblings_start_by_themselves_if_the_first_is_preempted() -> None:
    harness = Harness(block_size=2, num_blocks=8, max_num_batched_tokens=3)
    harness.add([1, 2], max_tokens=14)
    harness.step()
    harness.add([4] * 9, n=2, max_tokens=2)
    _, first, second = harness.sequences
    while not first.num_preemptions:
        assert isinstance(second.state, Held)
        harness.step()
    assert isinstance(second.state, Waiting)
    harness.drain()


def test_other_requests_do_not_wait_for_held_siblings() -> None:
    harness = Harness()
    harness.add([1] * 6, n=3)
    harness.add([2] * 6)
    plan = harness.plan()
    assert [known_tokens(start)[0] for start in plan.starts] == [1, 2]


def test_last_in_order_is_swapped_out_and_loses_its_row_in_one_plan() -> None:
    harness = crowded("swap")
    plan = run_until_preemption(harness)
    victim = harness.sequences[1]
    assert isinstance(victim.state, Swapped)
    assert [copy.target for copy in plan.swap_outs] == victim.state.cpu_ids
    assert harness.scheduler.stats().num_swapped_out_blocks == len(plan.swap_outs)
    assert plan.sequences == []


def test_blocks_on_their_way_out_are_not_used_before_the_acknowledgement() -> None:
    harness = crowded("swap")
    plan = run_until_preemption(harness)
    sources = {copy.source for copy in plan.swap_outs}
    assert plan.sequences == []
    harness.execute()
    harness.collect()
    assert harness.schedule() is None
    harness.acknowledge()
    following = harness.plan()
    assert len(following.sequences) == 1
    assert set(following.sequences[0].new_block_ids) <= sources


def test_no_second_sequence_makes_room_while_blocks_are_on_their_way() -> None:
    harness = Harness(block_size=2, num_blocks=6, num_cpu_blocks=8, preemption="swap")
    for token_id in (1, 2, 4):
        harness.add([token_id], max_tokens=8)
    run_until_preemption(harness)
    stats = harness.scheduler.stats()
    assert (stats.num_swapped, stats.num_running) == (1, 2)
    harness.drain()


def test_another_sequence_makes_room_if_more_wait_than_blocks_are_on_their_way() -> None:
    # The victim frees the two blocks that it does not share, for the first two of three.
    harness = Harness(
        block_size=4, num_blocks=14, num_cpu_blocks=16, max_num_seqs=6, preemption="swap"
    )
    harness.add([1] * 8, n=6, max_tokens=10)
    plan = run_until_preemption(harness)
    assert all(isinstance(sequence.state, Swapped) for sequence in harness.sequences[-2:])
    assert len(plan.swap_outs) == 4
    harness.drain()


def test_swapped_sequence_runs_only_after_its_blocks_are_back() -> None:
    harness = crowded("swap")
    run_until_preemption(harness)
    while not (plan := harness.schedule()) or not plan.swap_ins:
        harness.settle()
    victim = harness.sequences[1]
    assert known_tokens(plan.starts[0]) == list(victim.token_ids)
    assert plan.starts[0].block_ids == [copy.target for copy in plan.swap_ins]
    row = victim.state.row
    assert row not in [sequence.row for sequence in plan.sequences]
    harness.execute()
    harness.collect()
    assert harness.scheduler.stats().num_swapped == 1
    harness.acknowledge()
    plan = harness.plan()
    assert row in [sequence.row for sequence in plan.sequences]
    harness.drain()


def test_recomputed_sequence_starts_again_with_all_its_tokens() -> None:
    harness = crowded("recompute")
    run_until_preemption(harness)
    victim = harness.sequences[1]
    assert isinstance(victim.state, Waiting)
    while not (plan := harness.schedule()) or not plan.starts:
        harness.settle()
    assert known_tokens(plan.starts[0]) == list(victim.token_ids)
    assert plan.starts[0].num_prompt_tokens == 6
    harness.drain()


def test_sequence_is_recomputed_if_the_cpu_pool_is_full() -> None:
    harness = crowded("swap", num_cpu_blocks=1)
    harness.drain()
    stats = harness.scheduler.stats()
    assert stats.num_swap_preemptions == 0
    assert stats.num_recompute_preemptions > 0


@pytest.mark.parametrize(
    ("block_copy_s", "token_s", "is_swap"), [(0.001, 1.0, True), (1.0, 0.001, False)]
)
def test_measured_costs_decide_between_swapping_and_computing_again(
    block_copy_s: float, token_s: float, is_swap: bool
) -> None:
    harness = Harness(
        block_size=4, num_blocks=6, num_cpu_blocks=8, block_copy_s=block_copy_s, token_s=token_s
    )
    # What was never measured is swapped; after that both costs are known.
    for first, last in ((1, 2), (4, 5)):
        harness.add([first] * 6, max_tokens=16)
        harness.add([last] * 6, max_tokens=16)
        harness.drain()
    stats = harness.scheduler.stats()
    assert stats.num_swap_preemptions == (2 if is_swap else 1)
    assert stats.num_recompute_preemptions == (0 if is_swap else 1)


@pytest.mark.parametrize(("block_copy_s", "is_swap"), [(1.0, True), (8.0, False)])
def test_shared_blocks_are_no_reason_to_swap_or_to_recompute(
    block_copy_s: float, is_swap: bool
) -> None:
    harness = Harness(
        block_size=4,
        num_blocks=12,
        num_cpu_blocks=12,
        block_copy_s=block_copy_s,
        token_s=1.0,
        enable_cpu_prefix_cache=False,
    )
    # After these, the costs are known.
    for token_id in (1, 2, 4, 5):
        harness.add([token_id] * 14, max_tokens=16)
    harness.drain()
    before = harness.scheduler.stats()
    harness.add([10] * 32, n=2, max_tokens=14)
    while not any(sequence.num_preemptions for sequence in harness.sequences[-2:]):
        harness.step()
    # Two blocks and eight tokens are its own; seven blocks are shared.
    after = harness.scheduler.stats()
    assert after.num_swap_preemptions - before.num_swap_preemptions == is_swap
    assert after.num_recompute_preemptions - before.num_recompute_preemptions == (not is_swap)
    harness.drain()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_token_in_flight_at_preemption_is_kept(preemption: Preemption) -> None:
    harness = crowded(preemption)
    victim = harness.sequences[1]
    harness.schedule()
    while harness.schedule() and not victim.num_preemptions:
        harness.execute()
        harness.collect()
    assert victim.num_pending == 1
    num_known = len(victim.token_ids)
    harness.settle()
    assert len(victim.token_ids) == num_known + 1
    harness.drain()


def test_sequence_in_transit_can_be_aborted_either_way() -> None:
    for is_arriving in (False, True):
        harness = crowded("swap")
        run_until_preemption(harness)
        if is_arriving:
            while not isinstance(harness.sequences[1].state, Arriving):
                harness.settle()
                harness.schedule()
        (event,) = harness.abort("request-1")
        assert event.finish_reason is FinishReason.ABORT
        harness.drain()


@pytest.mark.parametrize(("num_preemptions", "num_blocks"), [(0, 2), (1, 4), (3, 6)])
def test_preempted_sequence_starts_with_room_for_some_tokens(
    num_preemptions: int, num_blocks: int
) -> None:
    harness = Harness(block_size=4, num_blocks=8)
    harness.add([1] * 6, max_tokens=16)
    (sequence,) = harness.sequences
    sequence.num_preemptions = num_preemptions
    harness.schedule()
    # Never more than it can need: the last of 22 tokens is not computed.
    assert len(sequence.blocks.ids) + len(sequence.blocks.reserved_ids) == num_blocks
    harness.drain()


def test_newcomer_leaves_a_block_for_each_running_sequence() -> None:
    harness = Harness(block_size=4, num_blocks=5)
    harness.add([1] * 8, max_tokens=4)
    harness.schedule()
    harness.add([2] * 9, max_tokens=4)
    harness.schedule()
    assert harness.scheduler.num_waiting == 1
    harness.drain()


@pytest.mark.parametrize("has_limit", some_slow([True, False], slow=[True]))
def test_a_pool_that_is_too_small_costs_little_throughput(has_limit: bool) -> None:
    # Without a limit each sequence may grow to a length of which the pool holds hardly one.
    fitting = throughput_of_pool(1.1, has_limit=has_limit)
    small = throughput_of_pool(0.9, has_limit=has_limit)
    assert small > 0.95 * fitting


@pytest.mark.parametrize(
    "workload",
    [pytest.param(one, marks=[pytest.mark.slow] if one in SLOW else []) for one in WORKLOADS],
)
def test_auto_is_as_good_as_the_better_of_swapping_and_recomputing(workload: Workload) -> None:
    swapped, recomputed, chosen = (
        throughput_of_preemption(workload, preemption)
        for preemption in ("swap", "recompute", "auto")
    )
    assert chosen > 0.95 * max(swapped, recomputed)
