from array import array

from cluster.scheduling.policy import (
    MAX_PREEMPTIONS,
    choose_preempted,
    choose_victim,
)
from cluster.scheduling.sequence import ActiveRequest, Sequence
from cluster.scheduling.sequence_table import SequenceQueue
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams


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


def make_queue(*sequences: Sequence) -> SequenceQueue:
    queue = SequenceQueue()
    for sequence in sequences:
        queue.insert(sequence)
    return queue


def test_queue_is_ordered_by_priority_then_arrival() -> None:
    late, early = make_sequence(arrival=2), make_sequence(arrival=1)
    urgent = make_sequence(arrival=3, priority=-1)
    assert list(make_queue(late, early, urgent)) == [urgent, early, late]


def test_removed_sequence_leaves_the_others_in_order() -> None:
    first, second, third = (make_sequence(arrival=arrival) for arrival in range(3))
    queue = make_queue(first, second, third)
    queue.remove(second)
    assert list(queue) == [first, third]


def test_last_in_order_makes_room() -> None:
    first, last = make_sequence(arrival=0), make_sequence(arrival=1)
    assert choose_victim(make_queue(first, last), first) is last


def test_no_sequence_makes_room_for_one_behind_it() -> None:
    first, last = make_sequence(arrival=0), make_sequence(arrival=1)
    assert choose_victim(make_queue(first, last), last) is None


def test_sequence_that_made_room_often_enough_is_protected() -> None:
    first, second, last = (make_sequence(arrival=arrival) for arrival in range(3))
    last.num_preemptions = MAX_PREEMPTIONS
    assert choose_victim(make_queue(first, second, last), first) is second


def test_last_makes_room_if_all_others_are_protected_too() -> None:
    first, second, last = (make_sequence(arrival=arrival) for arrival in range(3))
    second.num_preemptions = last.num_preemptions = MAX_PREEMPTIONS
    assert choose_victim(make_queue(first, second, last), first) is last


def test_sequence_whose_last_token_is_being_sampled_is_spared() -> None:
    first, last = make_sequence(arrival=0), make_sequence(arrival=1)
    last.num_computed = last.max_length - 1
    assert choose_victim(make_queue(first, last), first) is None


def test_only_a_sequence_of_lower_priority_that_does_not_end_anyway_is_displaced() -> None:
    head, equal, lower, ending = (
        make_sequence(arrival=arrival, priority=priority)
        for arrival, priority in enumerate((0, 0, 1, 2))
    )
    for sequence in (equal, lower, ending):
        sequence.active.share = head.share
    ending.num_computed = ending.max_length - 1
    assert choose_preempted(make_queue(equal, lower, ending), head, num_own=3) is lower
    assert choose_preempted(make_queue(equal, ending), head, num_own=2) is None


def test_the_most_served_tenant_with_two_rows_more_is_displaced() -> None:
    head, *running = (make_sequence(arrival=arrival) for arrival in range(5))
    for sequence, (time, num_rows) in zip(
        running, ((5.0, 3), (9.0, 3), (7.0, 3), (20.0, 2)), strict=True
    ):
        sequence.share.time, sequence.share.num_rows = time, num_rows
    assert choose_preempted(make_queue(*running), head, num_own=1) is running[1]
    head.share.time = 9.0
    assert choose_preempted(make_queue(*running), head, num_own=1) is None
