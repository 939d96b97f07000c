"""When an engine counts as stuck."""

from __future__ import annotations

import pytest

from cluster.serving.ray_serve.replica_engine import ProgressWatch

PERIOD_S = 5.0
STALL = "The engine has work but ran no step for 60 s."


class Replica:
    """A replica whose health is checked, in simulated time."""

    def __init__(self) -> None:
        self.watch = ProgressWatch(stall_timeout_s=60.0, replace_timeout_s=600.0)
        self.now_s = 0.0
        self.num_steps = 5

    def problem(self, *, has_work: bool = True, is_healthy: bool = True) -> str | None:
        """Check now."""
        return self.watch.problem(
            num_steps=self.num_steps, has_work=has_work, is_healthy=is_healthy, now_s=self.now_s
        )

    def problems_within(
        self, seconds: float, *, has_work: bool = True, is_healthy: bool = True
    ) -> set[str | None]:
        """Check regularly for some time; return what was found."""
        found = set()
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += PERIOD_S
            found.add(self.problem(has_work=has_work, is_healthy=is_healthy))
        return found


@pytest.fixture
def replica() -> Replica:
    replica = Replica()
    assert replica.problem() is None
    return replica


def test_work_without_steps_is_a_stall(replica: Replica) -> None:
    assert replica.problems_within(60) == {None}
    assert replica.problems_within(PERIOD_S) == {STALL}


def test_steps_are_progress(replica: Replica) -> None:
    for _ in range(50):
        replica.num_steps += 1
        assert replica.problems_within(50) == {None}


def test_a_pause_of_the_machine_is_no_stall(replica: Replica) -> None:
    for _ in range(5):
        replica.now_s += 3600.0
        assert replica.problem() is None
        replica.num_steps += 1
        assert replica.problem() is None
    assert replica.problems_within(65) == {None, STALL}


def test_an_idle_engine_is_not_stuck(replica: Replica) -> None:
    assert replica.problems_within(10_000, has_work=False) == {None}
    # Its first request has just arrived.
    assert replica.problems_within(60) == {None}
    assert replica.problems_within(PERIOD_S) == {STALL}


def test_replacing_ranks_may_take_long_but_not_forever(replica: Replica) -> None:
    assert replica.problems_within(600, is_healthy=False) == {None}
    assert replica.problems_within(PERIOD_S, is_healthy=False) == {
        "The ranks could not be replaced within 600 s."
    }
    # The first step of replaced ranks has the same time limit.
    assert replica.problems_within(60) == {None}
    assert replica.problems_within(PERIOD_S) == {STALL}
