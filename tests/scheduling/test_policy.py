from __future__ import annotations

from array import array

import pytest

from cluster.scheduling.policy import MAX_PREEMPTIONS, Preemptor, choose_preempted, choose_victim
from cluster.scheduling.sequence import ActiveRequest, Sequence, Swapped
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams
from tests.scheduling.harness import Harness


def make_sequence(*, arrival: int, priority: int = 0) -> Sequence:
    request = Request(
        id=f"r{arrival}",
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        seed=0,
        priority=priority,
    )
    return ActiveRequest(
        request, prompt=array("I", request.prompt_token_ids), arrival=arrival, max_model_len=100
    ).sequences[0]


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


def test_only_a_sequence_of_lower_priority_that_does_not_end_anyway_is_displaced() -> None:
    head, equal, lower, ending = (
        make_sequence(arrival=arrival, priority=priority)
        for arrival, priority in enumerate((0, 0, 1, 2))
    )
    for sequence in (equal, lower, ending):
        sequence.share = head.share
    ending.num_computed = ending.max_length - 1
    assert choose_preempted([equal, lower, ending], head, num_own=3) is lower
    assert choose_preempted([equal, ending], head, num_own=2) is None


def test_the_most_served_tenant_with_two_rows_more_is_displaced() -> None:
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
