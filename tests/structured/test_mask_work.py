"""The limits on masks of a step, and on those of one sequence."""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cluster.structured.mask_work import (
    CpuBudget,
    MaskJob,
    MaskWork,
    SequenceMatcher,
    TenantCpuBudgets,
)
from cluster.structured.messages import MadeMask, MaskQuery, MatcherStart
from pagedray.request import FinishReason
from tests.clock import Clock
from tests.fakes import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class QuickMatcher:
    """Allows all tokens, immediately."""

    is_complete = False
    is_free = False

    def accept_token(self, token_id: int) -> bool:
        return True

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        masks[row] = -1


def test_a_replay_is_not_charged_twice() -> None:
    fast: Any = QuickMatcher()  # Any: a fake
    budget = CpuBudget(0.0)
    # 100 tokens allow 1.5 s.
    matcher = SequenceMatcher(
        fast, MatcherStart(0, 0, False, (), (), cpu_s=1.4), 32, lambda: budget
    )
    masks = np.zeros((1, 1), np.int32)
    assert matcher.write_mask([1] * 100, masks, 0) is None
    assert matcher.cpu_s == 1.4
    assert matcher.write_mask([1], masks, 0) is None
    assert 1.4 < matcher.cpu_s < 1.5


def test_no_token_ends_a_sequence_before_min_tokens() -> None:
    free: Any = QuickMatcher()  # Any: a fake
    start = MatcherStart(0, 2, False, eos_token_ids=(0,), stop_token_ids=(3,))
    matcher = SequenceMatcher(free, start, 32, lambda: CpuBudget(0.0))
    forbidden = []
    for token_ids in ([], [1], [1]):
        masks = np.zeros((1, 1), np.int32)
        assert matcher.write_mask(token_ids, masks, 0) is None
        forbidden.append([token for token in range(32) if not masks[0, 0] >> token & 1])
    assert forbidden == [[0, 3], [0, 3], []]


class SleepingMatcher:
    """Sleeps until the end of the test."""

    error = ""
    is_free = False
    cpu_s = 0.0
    last_cpu_s = 0.0

    def __init__(self, end: threading.Event | None) -> None:
        self._end = end

    def write_mask(self, token_ids: Sequence[int], masks: object, row: int) -> None:
        if self._end is not None:
            self._end.wait(60.0)


# Any: a fake.
def job(query: MaskQuery, matcher: Any, expected_s: float | None = None) -> MaskJob:
    return MaskJob(query, "", lambda _: matcher, num_words=1, expected_s=expected_s)


class ChargingMatcher:
    """Charges a budget for CPU time that it does not take."""

    error = ""
    is_free = False
    cpu_s = 0.0

    def __init__(self, budget: CpuBudget, cpu_s: float) -> None:
        self.last_cpu_s = cpu_s
        self._budget = budget

    def write_mask(self, token_ids: Sequence[int], masks: object, row: int) -> FinishReason | None:
        if self._budget.is_exhausted:
            return FinishReason.ERROR
        self._budget.charge(self.last_cpu_s)
        return None


def test_the_slowest_masks_are_those_that_exhaust_a_budget() -> None:
    # Half a second, of which the quick masks take 20 ms.
    budget = CpuBudget(0.0)
    matchers = [ChargingMatcher(budget, 0.1 if i % 3 == 0 else 0.001) for i in range(30)]
    work = MaskWork(1, lambda _: None)
    jobs = [job(MaskQuery(i, [1]), one, one.last_cpu_s) for i, one in enumerate(matchers)]
    made = work.make_masks(jobs, 60.0)
    ended = {one.sequence_id for one in made if one.finish_reason is FinishReason.ERROR}
    # The fifth slow one takes more than is left.
    assert ended == {15, 18, 21, 24, 27}


REPLAYED = MatcherStart(0, 0, False, (), ())


@pytest.mark.parametrize("slow", [MaskQuery(1, [1]), MaskQuery(1, [1] * 600, REPLAYED)])
def test_a_mask_that_only_sleeps_is_not_waited_for(slow: MaskQuery) -> None:
    end = threading.Event()
    sent: list[MadeMask] = []
    work = MaskWork(1, sent.extend)
    jobs = [
        job(MaskQuery(0, [1]), SleepingMatcher(None)),
        job(slow, SleepingMatcher(end)),
        job(MaskQuery(2, [1]), SleepingMatcher(None)),
    ]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(work.make_masks, jobs, 60.0)
        wait_for(lambda: jobs[1].timer)
        answers: list[list[MadeMask]] = []
        while len(answers) < 2000 and not (answers and answers[-1]):
            # Time to fall asleep.
            time.sleep(0.001)
            answers.append(work.check_limits())
        end.set()
    found = next(index for index, answer in enumerate(answers) if answer)
    # Three seconds, of which each check counts a twentieth; it is asleep after the first.
    assert found >= 60
    assert [(one.sequence_id, one.finish_reason) for one in answers[found]] == [
        (0, None),
        (1, FinishReason.ERROR),
    ]
    assert {made.sequence_id for made in running.result()} == {0, 1, 2}
    assert sent == []


class ComputingMatcher:
    """Computes for a while, without the GIL."""

    error = ""
    is_free = False
    cpu_s = 0.0
    last_cpu_s = 0.0

    def write_mask(self, token_ids: Sequence[int], masks: object, row: int) -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)


def test_a_mask_that_waits_for_a_processor_is_not_to_blame() -> None:
    work = MaskWork(1, lambda _: None)
    # It may compute for ten seconds and sleep for sixty.
    computing = job(MaskQuery(1, [1] * 1000), ComputingMatcher())
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(work.make_masks, [computing], 60.0)
        wait_for(lambda: computing.timer)
        # It may have ended before the last check.
        found = [made for _ in range(2000) for made in work.check_limits()]
        assert {made.finish_reason for made in found} <= {None}
    (made,) = running.result()
    assert made.finish_reason is None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budgets(clock: Clock) -> TenantCpuBudgets:
    budgets = TenantCpuBudgets(clock)
    for sequence_id in range(256):
        budgets.add_sequence(sequence_id, "ann")
    budgets.add_sequence(256, "ben")
    return budgets


def test_a_large_batch_never_exhausts_its_budget(budgets: TenantCpuBudgets) -> None:
    for _ in range(1000):
        budgets.begin_step(range(256))
        for sequence_id in range(256):
            # The largest measured, where all are near the end of a limited string.
            budgets.budget_of(sequence_id).charge(0.0024)
            assert not budgets.budget_of(sequence_id).is_exhausted


def test_unused_time_is_saved_up_to_a_limit(budgets: TenantCpuBudgets) -> None:
    for _ in range(1000):
        budgets.begin_step([0])
    budgets.budget_of(0).charge(0.501)
    assert not budgets.budget_of(0).is_exhausted
    budgets.budget_of(0).charge(0.003)
    assert budgets.budget_of(0).is_exhausted


def test_a_tenant_is_charged_for_its_own_sequences_only(budgets: TenantCpuBudgets) -> None:
    budgets.begin_step(range(257))
    budgets.budget_of(0).charge(60.0)
    assert budgets.budget_of(255).is_exhausted
    assert not budgets.budget_of(256).is_exhausted


def test_a_tenant_that_ends_its_sequences_keeps_its_debt(
    budgets: TenantCpuBudgets, clock: Clock
) -> None:
    budgets.begin_step([0])
    budgets.budget_of(0).charge(60.0)
    budgets.remove_sequences(range(256))
    budgets.begin_step([256])
    budgets.add_sequence(257, "ann")
    budgets.begin_step([257])
    assert budgets.budget_of(257).is_exhausted
    # It owes half a second, and recovers a tenth of each second.
    clock.now_s = 5.0
    budgets.begin_step([257])
    assert not budgets.budget_of(257).is_exhausted


def test_a_budget_that_has_recovered_is_dropped(budgets: TenantCpuBudgets, clock: Clock) -> None:
    budgets.begin_step([0, 256])
    budgets.remove_sequences(range(256))
    clock.now_s = 9.0
    budgets.begin_step([256])
    assert len(budgets) == 2
    clock.now_s = 10.0
    budgets.begin_step([256])
    assert len(budgets) == 1


def test_budgets_may_be_added_while_recovered_ones_are_dropped() -> None:
    others = iter(range(1, 10))

    class Moment(float):
        """A time at whose subtraction another thread makes a late mask."""

        def __sub__(self, other: float) -> float:
            shared.budget_of(next(others))
            return float(self) - other

    shared = TenantCpuBudgets(lambda: Moment(20.0))
    for sequence_id in range(10):
        shared.add_sequence(sequence_id, f"tenant-{sequence_id}")
    shared.begin_step([0])
    # One is added during the refill of the first one, and two while both are checked.
    assert len(shared) == 4
