"""How long the process of a rank may take to start, after others have started."""

from __future__ import annotations

from cluster.engine.rank_monitor import StartLimit


def test_a_process_may_take_five_times_as_long_as_the_slowest_before() -> None:
    limit = StartLimit()
    assert limit.limit_s == 300.0
    limit.note_starts(4.0)
    assert limit.limit_s == 20.0
    limit.note_starts(1.0)
    assert limit.limit_s == 20.0


def test_a_process_may_always_take_ten_seconds() -> None:
    limit = StartLimit()
    limit.note_starts(0.5)
    assert limit.limit_s == 10.0


def test_the_limit_doubles_with_each_hang_up_to_that_of_the_first_start() -> None:
    limit = StartLimit()
    limit.note_starts(0.5)
    limits = []
    for _ in range(6):
        limit.note_hang()
        limits.append(limit.limit_s)
    assert limits == [20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
