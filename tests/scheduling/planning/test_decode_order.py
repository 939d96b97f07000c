"""Decodes of long sequences come first in a plan, and tokens reach their sequences."""

from array import array

from tests.scheduling.harness import Harness


def decode_rows(harness: Harness) -> list[int]:
    """Schedule and run a step; return the rows of its decodes, whose positions must fall."""
    plan = harness.schedule()
    assert plan is not None
    positions = list(array("i", plan.decodes.positions))
    assert positions == sorted(positions, reverse=True)
    harness.settle()
    return list(array("i", plan.decodes.rows))


def test_the_longest_come_first_and_equal_ones_in_the_order_of_their_start() -> None:
    harness = Harness()
    for length in (3, 9, 5, 9, 2):
        harness.add([length] * length, max_tokens=8)
    harness.step()
    third, first, other, second, last = (sequence.row for sequence in harness.sequences)
    in_order = [first, second, other, third, last]
    assert decode_rows(harness) == in_order
    assert decode_rows(harness) == in_order
    # The fake worker's tokens tell sequences apart, and the harness checks them.
    harness.drain()


def test_the_order_follows_who_comes_and_goes() -> None:
    harness = Harness()
    harness.add([1] * 4, max_tokens=20)
    harness.add([2] * 8, max_tokens=3)
    harness.step()
    short, long = (sequence.row for sequence in harness.sequences)
    assert decode_rows(harness) == [long, short]
    harness.add([3] * 30, max_tokens=20)
    harness.step()
    longest = harness.sequences[-1].row
    while len(rows := decode_rows(harness)) > 2:
        assert rows == [longest, long, short]
    assert rows == [longest, short]
    harness.drain()
