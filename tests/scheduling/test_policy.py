"""Victims, and a sequence that finds too few blocks: others overtake it, but not forever."""

from __future__ import annotations

import random

import pytest

from bench.scheduler.cases import wait_behind_large
from bench.scheduler.replica import make_replica
from cluster.scheduling.fair_queue import Backlog
from cluster.scheduling.policy import (
    GRACE_STEPS,
    MAX_PREEMPTIONS,
    Preemptor,
    StarvationGuard,
    choose_preempted,
    choose_victim,
)
from cluster.scheduling.sequence import Running, Sequence, Swapped
from cluster.scheduling.sequence_table import SequenceTable
from cluster.simulation.virtual_replica import VirtualCall, distinct_prompt
from pagedray.config import Preemption
from tests.scheduling.builders import make_active, make_manager, make_request
from tests.scheduling.harness import Harness
from tests.slow_params import some_slow


def make_sequence(*, arrival: int, priority: int = 0) -> Sequence:
    request = make_request(f"r{arrival}", priority=priority)
    return make_active(request, arrival=arrival).sequences[0]


def test_last_in_order_makes_room() -> None:
    first, last = make_sequence(arrival=0), make_sequence(arrival=1)
    assert choose_victim([first, last], first) is last


def test_no_sequence_makes_room_for_one_behind_it() -> None:
    first, last = make_sequence(arrival=0), make_sequence(arrival=1)
    assert choose_victim([first, last], last) is None


def test_sequence_that_made_room_often_enough_is_protected() -> None:
    first, second, last = (make_sequence(arrival=arrival) for arrival in range(3))
    last.num_preemptions = MAX_PREEMPTIONS
    assert choose_victim([first, second, last], first) is second


def test_last_makes_room_if_all_others_are_protected_too() -> None:
    first, second, last = (make_sequence(arrival=arrival) for arrival in range(3))
    second.num_preemptions = last.num_preemptions = MAX_PREEMPTIONS
    assert choose_victim([first, second, last], first) is last


def test_sequence_whose_last_token_is_being_sampled_is_spared() -> None:
    first, last = make_sequence(arrival=0), make_sequence(arrival=1)
    last.num_computed = last.max_length - 1
    assert choose_victim([first, last], first) is None


def test_only_a_sequence_of_lower_priority_that_does_not_end_anyway_is_preempted() -> None:
    head, equal, lower, ending = (
        make_sequence(arrival=arrival, priority=priority)
        for arrival, priority in enumerate((0, 0, 1, 2))
    )
    for sequence in (equal, lower, ending):
        sequence.share = head.share
    ending.num_computed = ending.max_length - 1
    assert choose_preempted([equal, lower, ending], head, num_own=3) is lower
    assert choose_preempted([equal, ending], head, num_own=2) is None


def test_the_most_served_tenant_with_two_rows_more_is_preempted() -> None:
    head, *running = (make_sequence(arrival=arrival) for arrival in range(5))
    for sequence, (time, num_rows) in zip(
        running, ((5.0, 3), (9.0, 3), (7.0, 3), (20.0, 2)), strict=True
    ):
        sequence.share.time, sequence.share.num_rows = time, num_rows
    assert choose_preempted([*running], head, num_own=1) is running[1]
    head.share.time = 9.0
    assert choose_preempted([*running], head, num_own=1) is None


def wait_behind_swapped(
    tenant: str, *, priority: int = 0, time: float = 5.0
) -> tuple[Preemptor, Sequence]:
    """Return a preemptor, and a waiting sequence of a tenant "one" that may take a row of "many".

    A swapped sequence has a tenant whose clock is `time`; that of "one" is 5, of "many" 10.
    """
    harness = Harness(max_num_seqs=4)
    for token_id in range(3):
        harness.add([token_id], tenant="many", max_tokens=20)
    harness.add([3], tenant=tenant, priority=priority, max_tokens=20)
    harness.step()
    harness.add([4], tenant="one")
    *_, many, swapped, head = harness.sequences
    state = Swapped(cpu_ids=[], num_unswapped=0, ready_step=0)
    harness.scheduler._table.preempt_sequence(swapped, state)
    many.share.time, swapped.share.time, head.share.time = 10.0, time, 5.0
    return harness.scheduler._planner._preemptor, head


@pytest.mark.parametrize(
    ("tenant", "priority", "time", "may_preempt"),
    [
        ("one", 0, 5.0, False),
        ("one", 1, 5.0, True),
        ("other", 1, 5.0, False),
        ("other", -1, 6.0, True),
    ],
    ids=["same priority", "lower priority", "served as much", "served more"],
)
def test_no_waiting_sequence_takes_a_row_before_a_swapped_one_that_precedes_it(
    tenant: str, priority: int, time: float, *, may_preempt: bool
) -> None:
    preemptor, head = wait_behind_swapped(tenant, priority=priority, time=time)
    assert preemptor.may_preempt(head, []) == may_preempt


def test_a_sequence_with_a_token_in_flight_takes_no_row() -> None:
    preemptor, head = wait_behind_swapped("other", time=6.0)
    head.prefill_end += 1
    assert not preemptor.may_preempt(head, [])


BOUND = GRACE_STEPS + 10
"""Steps for which those that pass may delay a sequence: until it is found due, their grace, and
until their blocks are swapped out."""


def test_newcomers_do_not_wait_for_a_sequence_that_finds_no_room() -> None:
    alone, _ = wait_behind_large(num_newcomers=0)
    large, newcomers = wait_behind_large(num_newcomers=300)
    assert max(call.num_steps_to_first_token for call in newcomers) <= 10
    assert large.start_step <= alone.start_step + BOUND


def run_beside_newcomers(seed: int, *, newcomers: bool, preemption: Preemption) -> VirtualCall:
    """Return a large request that arrives among some others, perhaps with many behind it."""
    rng = random.Random(seed)
    num_blocks = rng.randint(100, 300)
    replica = make_replica(
        num_blocks=num_blocks,
        num_cpu_blocks=rng.choice((0, 400)),
        max_num_seqs=rng.choice((8, 32)),
        max_num_batched_tokens=512,
        max_model_len=num_blocks * 16,
        preemption=preemption,
    )
    tenants = ("one", "two") if seed % 2 else ("one",)
    for number in range(rng.randint(1, 4)):
        replica.submit(
            distinct_prompt(number, rng.randint(100, num_blocks * 4)),
            num_output_tokens=rng.randint(50, 150),
            tenant=rng.choice(tenants),
        )
    large = replica.submit(
        distinct_prompt(99, num_blocks * rng.randint(8, 13)),
        num_output_tokens=20,
        tenant="one",
        arrival_s=0.3,
    )
    for number in range(100, 400 if newcomers else 100):
        replica.submit(
            distinct_prompt(number, rng.randint(1, 60)),
            num_output_tokens=rng.randint(1, 300),
            tenant=rng.choice(tenants),
            # Another tenant's may start first if that tenant was served less.
            arrival_s=0.5 + (number - 100) / 100,
        )
    replica.run()
    assert not replica.has_work
    return large


@pytest.mark.parametrize("seeds", some_slow([range(2), range(2, 12)], slow=[range(2, 12)]))
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_large_sequence_starts_in_bounded_time_whatever_arrives_later(
    preemption: Preemption, seeds: range
) -> None:
    for seed in seeds:
        alone = run_beside_newcomers(seed, newcomers=False, preemption=preemption)
        large = run_beside_newcomers(seed, newcomers=True, preemption=preemption)
        assert large.start_step <= alone.start_step + BOUND, seed


def make_table() -> SequenceTable:
    backlog = Backlog(max_requests=100, max_tokens=100)
    return SequenceTable(make_manager(), num_rows=8, backlog=backlog)


def test_overtakers_may_go_on_for_16_steps_after_each_time_they_hold_enough() -> None:
    guard = StarvationGuard(make_table())
    for first_step in (100, 200):
        steps = range(first_step, first_step + 20)
        may_take = [step for step in steps if guard.note_reserved(step, has_enough=True)]
        assert may_take == [first_step + 16 + number for number in range(4)]
        assert not guard.note_reserved(first_step + 20, has_enough=False)
        assert not guard.is_reserved


def passed_by_four(num_blocks: int) -> tuple[Harness, str]:
    """Return a harness with a large request that the last four requests pass, and its id."""
    harness = Harness(
        block_size=64,
        num_blocks=40,
        max_model_len=2500,
        max_num_batched_tokens=4000,
        enable_prefix_cache=False,
    )
    # These have nine blocks, and 16 for a few steps.
    harness.add([1] * 520, max_tokens=40)
    harness.add([1] * 1000, max_tokens=6)
    harness.step()
    large = harness.add([2] * num_blocks * 64, max_tokens=1)
    for _ in range(4):
        harness.add([3] * 10, max_tokens=50)
    return harness, large


# Each overtaker that loses its block leaves another one, which is kept free for it.
@pytest.mark.parametrize(
    ("num_blocks", "preempted"), [(28, [0, 1, 1, 1]), (30, [1, 1, 1, 1])], ids=["some", "all"]
)
def test_only_as_many_overtakers_lose_their_blocks_as_needed_the_last_first(
    num_blocks: int, preempted: list[int]
) -> None:
    harness, large = passed_by_four(num_blocks)
    overtakers = harness.sequences[-4:]
    for _ in range(GRACE_STEPS):
        harness.step()
    assert all(isinstance(one.state, Running) for one in overtakers)
    assert not any(one.num_preemptions for one in overtakers)
    while not harness.results.tokens[large, 0]:
        harness.step()
    assert [one.num_preemptions for one in overtakers] == preempted


def test_a_sequence_that_lacks_only_a_row_takes_that_of_the_last_overtaker() -> None:
    harness = Harness(
        block_size=64,
        num_blocks=40,
        max_num_seqs=3,
        max_model_len=2500,
        max_num_batched_tokens=4000,
        enable_prefix_cache=False,
    )
    first = harness.add([1] * 1900, max_tokens=100)
    harness.step()
    large = harness.add([2] * 20 * 64, max_tokens=1)
    for _ in range(2):
        harness.add([3] * 10, max_tokens=100)
    harness.step()
    # One that does not overtake takes the row, and leaves the blocks.
    harness.abort(first)
    harness.add([4] * 10, max_tokens=100, priority=-1)
    for _ in range(BOUND):
        harness.step()
    assert len(harness.results.tokens[large, 0]) == 1
    assert [one.num_preemptions for one in harness.sequences[-3:]] == [0, 1, 0]
    harness.drain()


def test_many_large_sequences_of_a_tenant_are_passed_by_another_tenant() -> None:
    harness = Harness(block_size=4, num_blocks=24, enable_prefix_cache=False)
    harness.add([1] * 44, tenant="one", max_tokens=8)
    for _ in range(2):
        harness.step()
    # Least served, and as many as may be passed in one step.
    for _ in range(8):
        harness.add([2] * 60, tenant="two", max_tokens=1)
    small = harness.add([3], tenant="one", max_tokens=1)
    harness.step()
    assert len(harness.results.tokens[small, 0]) == 1
    harness.drain()


def test_others_start_again_once_the_sequence_that_none_may_pass_is_aborted() -> None:
    harness, large = passed_by_four(28)
    for _ in range(10):
        harness.step()
    newcomer = harness.add([3] * 10, max_tokens=1)
    harness.step()
    assert harness.results.tokens[newcomer, 0] == []
    harness.abort(large)
    harness.step()
    assert len(harness.results.tokens[newcomer, 0]) == 1
    harness.drain()


def test_only_later_sequences_that_start_after_the_shortage_overtake() -> None:
    table = make_table()
    guard = StarvationGuard(table)
    sequences = [make_sequence(arrival=arrival) for arrival in range(5)]
    earlier, starved, before, after, ending = sequences
    for sequence in sequences:
        table.add_request(sequence.active)
    ending.num_computed = ending.max_length - 1
    table.start_sequence(before, copies_step=None)
    guard.note_failure(starved)
    for sequence in (earlier, after, ending):
        table.start_sequence(sequence, copies_step=None)
    assert guard.starved is starved
    assert guard.overtakers(starved) == [after]
    table.start_sequence(starved, copies_step=None)
    assert guard.starved is None
