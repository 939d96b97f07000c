"""Sequences whose values are bad: no new request finds what was computed with them."""

import pytest

from cluster.scheduling.sequence import Finished, Queued
from pagedray.config import Preemption
from tests.scheduling.harness import Harness


def num_hits(harness: Harness, prompt: list[int]) -> int:
    """Return how many tokens of a prompt are cached."""
    request_id = harness.add(prompt, max_tokens=1)
    harness.drain()
    (event,) = [event for event in harness.results.events if event.request_id == request_id]
    return event.num_cached_tokens


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_blocks_of_a_sequence_that_was_preempted_meanwhile_are_forgotten(
    preemption: Preemption,
) -> None:
    num_preempted = 0
    for bad_position in range(4, 16):
        harness = Harness(
            block_size=2, num_blocks=9, num_cpu_blocks=9, preemption=preemption, max_model_len=18
        )
        harness.add([7] * 5, max_tokens=12)
        harness.add([1] * 6, max_tokens=12, bad_position=bad_position)
        bad = harness.sequences[1]
        harness.schedule()
        while not isinstance(bad.state, Finished):
            # The plan of the next step, then the output of this one.
            harness.schedule()
            state = bad.state
            harness.execute()
            harness.collect()
            harness.acknowledge()
        num_preempted += isinstance(state, Queued)
        assert num_hits(harness, [1] * 5) == 0
    assert num_preempted


def test_blocks_of_a_sequence_that_ended_meanwhile_are_forgotten() -> None:
    harness = Harness(block_size=2)
    request_id = harness.add([1] * 6, bad_position=0)
    harness.schedule()
    harness.abort(request_id)
    harness.settle()
    assert num_hits(harness, [1] * 5) == 0


def test_nothing_is_found_that_was_computed_on_top_of_bad_values() -> None:
    harness = Harness(block_size=2, max_num_batched_tokens=4)
    harness.add([1] * 4 + [5], bad_position=0)
    aborted = harness.add([1] * 4 + [2] * 20)
    harness.turn()
    harness.schedule()
    assert harness.sequences[1].num_computed > 4, "it has not started on top of bad values"
    harness.settle()
    harness.abort(aborted)
    assert num_hits(harness, [1] * 4 + [3]) == 0
    assert num_hits(harness, [1] * 4 + [2] * 3) == 4


def test_a_long_prompt_is_verified_by_its_first_token() -> None:
    harness = Harness(block_size=2)
    stem = [1] * 20
    harness.add(stem, max_tokens=50)
    harness.step()
    harness.add([*stem, 3, 3], bad_position=21)
    harness.step()
    assert num_hits(harness, [*stem, 4]) == 0
    (renewed,) = harness.scheduler._kv.device._invalidated
    assert renewed != harness.sequences[0].blocks.keys[0].digest


def test_what_continues_a_verified_prefix_is_still_found() -> None:
    harness = Harness(block_size=2)
    stem = [1] * 6
    assert num_hits(harness, [*stem, 2, 2, 2]) == 0
    harness.add([*stem, 3, 3, 3], bad_position=7)
    harness.drain()
    assert num_hits(harness, [*stem, 3, 3, 3]) == 0
    assert num_hits(harness, [*stem, 2, 2, 2]) == 8


def test_many_renewals_use_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.scheduling.device_tier._MAX_INVALIDATED", 3)
    harness = Harness(block_size=2)
    for first in range(10):
        harness.add([first, 1, 1, 1, 1], bad_position=0)
        harness.drain()
        assert num_hits(harness, [first, 1, 1, 1, 1]) == 0
        assert num_hits(harness, [first, 1, 1, 1, 1]) == 4
    cache = harness.scheduler._kv.device
    assert cache is not None
    assert len(cache._invalidated) <= 3


def test_a_sequence_that_is_finished_in_prefill_verifies_nothing() -> None:
    harness = Harness(block_size=2, max_num_batched_tokens=3)
    request_id = harness.add([0] * 6, bad_position=1)
    harness.schedule()
    harness.finish(request_id, 0)
    harness.settle()
    cache = harness.scheduler._kv.device
    assert cache is not None
    assert len(cache) == 1
    assert not any(cache.is_verified(block) for block in range(64))
    harness.drain()


def test_a_sequence_that_is_preempted_in_prefill_verifies_nothing() -> None:
    harness = Harness(block_size=2, num_blocks=8, max_num_batched_tokens=3)
    harness.add([1, 2], max_tokens=14)
    harness.step()
    harness.add([4] * 9, max_tokens=2, bad_position=1)
    first, second = harness.sequences
    while not second.num_preemptions:
        harness.step()
    assert not second.has_sampled
    cache = harness.scheduler._kv.device
    verified = {block for block in range(8) if cache.is_verified(block)}
    assert len(cache) > 4
    assert verified <= set(first.blocks.ids)
    harness.drain()


def test_a_sequence_that_is_finished_after_a_token_verifies_what_gave_it() -> None:
    harness = Harness(block_size=2)
    request_id = harness.add([0] * 6)
    harness.step()
    harness.finish(request_id, 0)
    cache = harness.scheduler._kv.device
    assert cache is not None
    assert sum(cache.is_verified(block) for block in range(64)) == 3
    harness.drain()


def test_a_sequence_verifies_the_prompt_that_a_sibling_computed_and_left_unverified() -> None:
    harness = Harness(block_size=2)
    request_id = harness.add([0] * 6, n=2, max_tokens=1)
    harness.schedule()
    # The second sequence shares the prompt before the first one has a token, and gets none.
    harness.schedule()
    assert harness.sequences[1].num_computed >= 5
    harness.finish(request_id, 0)
    harness.drain()
    cache = harness.scheduler._kv.device
    assert sum(cache.is_verified(block) for block in range(64)) == 2
