"""Which requests of a call run at once, in a model of an engine without other limits."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.llm.runner import CallWidth, longest_first

LEAST = 256


@dataclass(frozen=True, slots=True)
class Run:
    """What a call took."""

    num_steps: int
    num_most: int
    """Requests that ran at once, at most."""
    num_few: int
    """Steps of less than a quarter of `LEAST`."""
    num_begun_by_step: list[int]


def run(lengths: list[int], ends: list[int] | None = None) -> Run:
    """Run requests of these maximum lengths, which end after `ends` tokens, a token a step."""
    order = longest_first(lengths)
    width = CallWidth([lengths[index] for index in order])
    left = [(ends or lengths)[index] for index in order]
    running: list[int] = []
    num_begun, counts, begun = 0, list[int](), list[int]()
    while running or num_begun < len(lengths):
        more = width.num_to_begin(num_waiting=len(lengths) - num_begun, num_running=len(running))
        running += range(num_begun, num_begun + more)
        num_begun += more
        begun.append(more)
        # Otherwise nothing would ever begin.
        assert running
        counts.append(len(running))
        for index in running:
            left[index] -= 1
        for index in running:
            if not left[index]:
                width.end(index)
        running = [index for index in running if left[index]]
    num_few = sum(count < LEAST / 4 for count in counts)
    return Run(len(counts), max(counts, default=0), num_few, begun)


def test_the_longest_come_first_and_equal_ones_keep_their_order() -> None:
    assert longest_first([2, 9, 2, 5, 9]) == [1, 4, 3, 0, 2]


@given(st.integers(0, 1000), st.integers(1, 3))
def test_requests_of_one_length_run_at_once(num_requests: int, length: int) -> None:
    found = run([length] * num_requests)
    assert found.num_most == num_requests
    assert found.num_steps == (length if num_requests else 0)


@given(st.lists(st.integers(1, 40), max_size=LEAST))
def test_a_small_call_runs_at_once(lengths: list[int]) -> None:
    found = run(lengths)
    assert found.num_most == len(lengths)


@settings(max_examples=20)
@given(st.data())
def test_every_request_ends_soon_after_the_longest(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=260, max_size=500))
    ends = [data.draw(st.integers(1, length)) for length in lengths[:5]] + lengths[5:]
    found = run(lengths, ends)
    # Graham's bound for any order, and a group of an eighth that may be missing at any time.
    bound = sum(lengths) / (min(LEAST, len(lengths)) * 7 / 8) + max(lengths)
    assert found.num_steps <= bound


def test_few_steps_have_few_requests() -> None:
    chance = random.Random(0)
    # A long tail, as lengths of answers have.
    lengths = [min(max(round(chance.lognormvariate(5.2, 0.9)), 4), 1024) for _ in range(1000)]
    counts_together = [sum(length > step for length in lengths) for step in range(max(lengths))]
    found = run(lengths)
    assert found.num_most < 400
    assert found.num_steps < 1.05 * max(lengths)
    assert found.num_few < 0.25 * sum(count < LEAST / 4 for count in counts_together)


def test_others_begin_when_the_longest_ends_early() -> None:
    lengths = [4096] + [64] * 1000
    found = run(lengths, [5] + [64] * 1000)
    assert found.num_begun_by_step[0] == LEAST
    # The others can all end with the longest of those that are left.
    assert found.num_begun_by_step[5] == 1001 - LEAST


def test_requests_begin_in_groups() -> None:
    lengths = [400] * 100 + [200 + place % 97 for place in range(100)] + [20] * 800
    found = run(lengths)
    groups = [count for count in found.num_begun_by_step if count]
    assert min(groups[:-1]) >= LEAST // 8
