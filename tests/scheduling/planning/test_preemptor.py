"""Which waiting sequences may take the rows of others."""

import pytest

from cluster.scheduling.policy import Preemptor
from cluster.scheduling.sequence import Sequence, SequenceState
from tests.scheduling.harness import Harness


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
    harness.scheduler._table.preempt_sequence(swapped, SequenceState.SWAPPED)
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
