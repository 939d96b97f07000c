"""The head of a Ray cluster waits for workers that drain, and ends soon if none does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster.cli.deploy_hold import wait_for_drains

LIMIT_S = 150.0


@dataclass(slots=True)
class FakeNodes:
    """Workers that drain for a while, and a GCS that may be away; the time is how often asked."""

    drains: list[tuple[float, float]] = field(default_factory=list)
    is_away: tuple[float, float] = (0.0, 0.0)
    now_s: float = 0.0

    def num_draining(self) -> int:
        if self.is_away[0] <= self.now_s < self.is_away[1]:
            raise ConnectionError("The GCS does not answer")
        return sum(begin <= self.now_s < end for begin, end in self.drains)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def _wait(nodes: FakeNodes) -> tuple[str, float]:
    reason = wait_for_drains(nodes, limit_s=LIMIT_S, clock=lambda: nodes.now_s, sleep=nodes.sleep)
    return reason, nodes.now_s


def test_a_head_that_ends_alone_waits_for_workers_to_begin_only() -> None:
    assert _wait(FakeNodes()) == ("No worker is draining", 10.0)


@pytest.mark.parametrize("begin_s", [0.0, 6.0, 9.0])
def test_a_head_that_ends_with_its_workers_waits_for_the_last(begin_s: float) -> None:
    nodes = FakeNodes(drains=[(begin_s, 40.0), (begin_s, 90.0)])
    assert _wait(nodes) == ("No worker is draining", 90.0)


def test_a_worker_that_drains_for_long_is_not_waited_for_beyond_the_limit() -> None:
    nodes = FakeNodes(drains=[(0.0, 1000.0)])
    assert _wait(nodes) == ("The limit is reached", LIMIT_S)


def test_a_gcs_that_has_ended_holds_nothing() -> None:
    nodes = FakeNodes(drains=[(0.0, 100.0)], is_away=(20.0, 1000.0))
    assert _wait(nodes) == ("The GCS does not answer", 22.0)


def test_a_gcs_that_misses_a_question_is_asked_again() -> None:
    nodes = FakeNodes(drains=[(0.0, 100.0)], is_away=(20.0, 22.0))
    assert _wait(nodes) == ("No worker is draining", 100.0)
