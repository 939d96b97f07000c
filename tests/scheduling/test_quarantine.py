"""Requests that may not run wait, whatever their state, and continue when they may."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.scheduling.prefix_cache import PrefixCache
from pagedray.batch import StepOutput
from pagedray.request import FinishReason
from tests.scheduling.builders import make_request, make_scheduler
from tests.scheduling.harness import Harness

if TYPE_CHECKING:
    from cluster.scheduling.sequence import Sequence


def make_harness(**options: object) -> Harness:
    given = {
        "block_size": 2,
        "num_blocks": 40,
        "num_cpu_blocks": 10,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "preemption": "swap",
    }
    return Harness(**{**given, **options})  # type: ignore[arg-type]  # options of several types


def test_quarantined_requests_run_no_step() -> None:
    harness = make_harness()
    first, second = harness.add([1, 2, 3], max_tokens=9), harness.add([4, 5], max_tokens=9)
    for _ in range(3):
        harness.turn()
    harness.restrict({second})
    harness.settle()
    known = harness.scheduler.lengths_of([first])
    for _ in range(4):
        harness.step()
    assert harness.scheduler.lengths_of([first]) == known
    assert harness.scheduler.num_running == 1
    harness.restrict(None)
    harness.drain()
    assert (
        harness.results.reasons[first, 0]
        is harness.results.reasons[second, 0]
        is FinishReason.LENGTH
    )


def test_a_request_that_arrives_quarantined_waits() -> None:
    harness = make_harness()
    harness.restrict(set())
    harness.add([1, 2], n=2, max_tokens=4)
    assert harness.scheduler.schedule() is None
    assert harness.scheduler.num_waiting == 2
    harness.restrict(None)
    harness.drain()


def test_siblings_that_wait_for_a_quarantined_prompt_are_quarantined_too() -> None:
    harness = make_harness(max_num_batched_tokens=2)
    name = harness.add([1] * 9, n=3, max_tokens=4)
    harness.turn()
    harness.restrict(set())
    harness.settle()
    assert harness.scheduler.schedule() is None
    harness.abort(name)
    harness.restrict(None)
    harness.drain()


def test_a_death_while_some_are_quarantined_loses_nothing() -> None:
    harness = make_harness()
    first, _ = harness.add([1, 2, 3], max_tokens=9), harness.add([4, 5], max_tokens=9)
    for _ in range(4):
        harness.turn()
    # Tokens of the other request are in flight.
    harness.restrict({first})
    harness.replace_worker()
    harness.turn()
    harness.restrict(None)
    harness.drain()


@pytest.mark.parametrize("num_steps", [1, 2])
def test_lengths_in_flight_are_those_of_the_plans_without_an_output(num_steps: int) -> None:
    harness = make_harness(max_num_batched_tokens=4)
    first, second = harness.add([1] * 7, max_tokens=9), harness.add([4], max_tokens=9)
    assert harness.scheduler.in_flight_lengths() == {}
    for _ in range(num_steps):
        harness.schedule()
    # Four tokens of the first, then its other three and the second.
    expected = {first: {0: 7}, second: {0: 1}} if num_steps == 2 else {first: {0: 7}}
    assert harness.scheduler.in_flight_lengths() == expected
    harness.settle()
    assert harness.scheduler.in_flight_lengths() == {}
    harness.drain()


def test_no_token_follows_one_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(block_size=3, num_blocks=8, max_model_len=24)
    scheduler.add_request(make_request("r", (1, 2), max_tokens=2))
    # The second step is planned before the first one ends, and has the last token.
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert None not in plans

    def fail(_: PrefixCache, sequence: Sequence) -> None:
        raise RuntimeError(f"A defect with {sequence.request_id}.")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "register_blocks", fail)
        assert scheduler.update(StepOutput(0, [7])) == []
    assert scheduler.update(StepOutput(1, [8])) == []
    scheduler.acknowledge(1)
    (event,) = scheduler.repair()
    assert (event.request_id, event.finish_reason) == ("r", FinishReason.ERROR)
    assert not scheduler.has_work
