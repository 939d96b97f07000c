"""What a hang is called, and the limits while ranks start; time is simulated."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from cluster.engine.rank_monitor import RankMonitor, StartLimit
from pagedray.batch import SequencePlan, StepPlan
from pagedray.rank_progress import Phase, ProgressBoard, ProgressWord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.rank_progress import RankReport

TICK_S = 0.25


class Ranks:
    """Two ranks whose processes run or not, and their monitor."""

    def __init__(self, board: ProgressBoard) -> None:
        self.board = board
        self.words = [ProgressWord(), ProgressWord()]
        self.stopped: set[int] = set()
        self.quiet: set[int] = set()
        """Ranks without heartbeats whose processes are not stopped."""
        self.start_limit = StartLimit()
        self._now_s = 0.0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.monitor = RankMonitor(self, "cpu", self.start_limit)

    def start_processes(self) -> None:
        for rank, word in enumerate(self.words):
            word.attach(self.board.address, rank)

    def read(self) -> list[RankReport]:
        return [self.board.report(rank) for rank in range(2)]

    def process_state(self, rank: int) -> str:
        return "is stopped" if rank in self.stopped else ""

    def is_stopped(self, rank: int) -> bool:
        return rank in self.stopped

    def hang_within(self, seconds: float) -> str:
        """Let time pass; return the first hang, or an empty string."""
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            self._now_s += TICK_S
            for rank, word in enumerate(self.words):
                if rank not in self.stopped | self.quiet and self.board.report(rank).pid:
                    word.beat(is_compiling=False)
            if hang := self.monitor.observe(self._now_s).hang:
                return hang
        return ""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with closing(ProgressBoard(2)) as board:
        yield Ranks(board)


def test_rank_that_is_stuck_in_a_layer_is_named_with_where_all_stand(ranks: Ranks) -> None:
    ranks.start_processes()
    ranks.monitor.begin_steps()
    plan = StepPlan(0, [SequencePlan(0, 5, 1, True)])
    ranks.monitor.note_message(plan)
    for word in ranks.words:
        word.finish_step(0)
    assert not ranks.hang_within(100.0)

    ranks.monitor.note_message(StepPlan(1, plan.sequences))
    ranks.words[0].enter(Phase.LAYER, 2)
    ranks.words[0].begin_collective(Phase.ALL_REDUCE)
    ranks.words[1].enter(Phase.LAYER, 2)
    places = "rank 0: the all-reduce of layer 2; rank 1: layer 2"
    assert ranks.hang_within(10.0) == f"Rank 1 has made no progress for 6.2 s ({places})."
    assert ranks.monitor.hung == [1]


def test_loading_may_take_long_as_long_as_it_progresses(ranks: Ranks) -> None:
    ranks.start_processes()
    for tensor in range(10):
        for word in ranks.words:
            word.enter(Phase.LOADING, tensor)
        assert not ranks.hang_within(250.0)
    assert "rank 1: loading weights (9 tensors loaded)" in ranks.hang_within(400.0)


def test_process_that_is_silent_while_loading_is_named_after_a_minute(ranks: Ranks) -> None:
    ranks.start_processes()
    assert not ranks.hang_within(10.0)
    ranks.quiet.add(0)
    assert not ranks.hang_within(55.0)
    assert ranks.hang_within(10.0).startswith("Rank 0 has made no progress for ")


def test_process_that_is_stopped_while_loading_is_named_within_seconds(ranks: Ranks) -> None:
    ranks.start_processes()
    assert not ranks.hang_within(10.0)
    ranks.stopped.add(0)
    assert not ranks.hang_within(5.0)
    hang = ranks.hang_within(3.0)
    assert hang.startswith("Rank 0 has made no progress for ")
    assert "rank 0: waiting for the other ranks to start, and its process is stopped" in hang


def test_short_stop_of_a_silent_process_that_loads_is_no_hang(ranks: Ranks) -> None:
    ranks.start_processes()
    assert not ranks.hang_within(10.0)
    # It imports its libraries on a busy machine.
    ranks.quiet.add(0)
    assert not ranks.hang_within(30.0)
    ranks.stopped.add(0)
    assert not ranks.hang_within(1.0)
    ranks.stopped.clear()
    assert not ranks.hang_within(20.0)


def test_process_that_never_starts_is_named(ranks: Ranks) -> None:
    assert not ranks.hang_within(290.0)
    assert "rank 1: its process has not started" in ranks.hang_within(20.0)


def test_replacement_has_several_times_as_long_to_start_as_the_first_processes(
    ranks: Ranks,
) -> None:
    assert not ranks.hang_within(4.0)
    ranks.start_processes()
    assert not ranks.hang_within(1.0)
    ranks.monitor.begin_steps()
    # On a new board nothing is written before a process has started.
    with closing(ProgressBoard(2)) as ranks.board:
        ranks.begin_epoch()
        assert not ranks.hang_within(20.0)
        assert "rank 1: its process has not started" in ranks.hang_within(3.0)


def test_rank_that_waits_for_others_to_load_is_not_blamed(ranks: Ranks) -> None:
    ranks.start_processes()
    ranks.words[1].enter(Phase.LOADING, 3)
    hang = ranks.hang_within(400.0)
    assert hang.startswith("Rank 1 has")


def test_what_makes_ranks_slower_is_counted_over_all_ranks(ranks: Ranks) -> None:
    ranks.start_processes()
    ranks.monitor.begin_steps()
    for number, word in enumerate(ranks.words, start=1):
        word.note_unpinned(number)
        word.add_uncaptured(10 * number)
    health = ranks.monitor.observe(0.0)
    assert (health.num_unpinned, health.num_uncaptured) == (3, 30)


def test_ranks_are_busy_while_a_step_or_a_copy_is_unfinished(ranks: Ranks) -> None:
    ranks.start_processes()
    ranks.monitor.begin_steps()
    for word in ranks.words:
        word.enter(Phase.LAYER, 2)
    assert not ranks.monitor.observe(0.0).is_busy
    ranks.monitor.note_message(StepPlan(0, [SequencePlan(0, 5, 1, True)]))
    assert ranks.monitor.observe(0.25).is_busy
    ranks.words[0].finish_step(0)
    assert ranks.monitor.observe(0.5).is_busy
    # It waits for masks, which the controller sends.
    ranks.words[1].enter(Phase.MASKS, 0)
    assert not ranks.monitor.observe(0.75).is_busy
    ranks.words[1].enter(Phase.LAYER, 0)
    ranks.words[1].finish_step(0)
    assert not ranks.monitor.observe(1.0).is_busy
    ranks.words[0].await_copies(0)
    assert ranks.monitor.observe(1.25).is_busy
    ranks.words[0].await_copies(None)
    assert not ranks.monitor.observe(1.5).is_busy


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
