"""How many deaths of ranks end an engine, and how long replacements wait."""

from __future__ import annotations

import pytest

from cluster.engine.crash_search import DeathBudget
from pagedray.errors import WorkerError

ERROR = WorkerError("A rank died.")


def test_deaths_with_steps_between_are_replaced_at_once_for_hours() -> None:
    budget = DeathBudget()
    for number in range(900):
        assert budget.note_death(20.0 * number, ERROR, num_steps=number) == 0.0


def test_many_deaths_in_a_short_time_spend_the_budget() -> None:
    budget = DeathBudget(max_deaths=60, window_s=600.0)
    for second in range(59):
        budget.note_death(float(second), ERROR, num_steps=second)
    with pytest.raises(WorkerError, match=r"60 times in 600 s\. A rank died\.") as caught:
        budget.note_death(599.0, ERROR, num_steps=59)
    assert caught.value.retry_after_s == 10.0


def test_pauses_grow_while_no_step_finishes() -> None:
    budget = DeathBudget()
    pauses = [budget.note_death(0.1, ERROR, num_steps=7) for _ in range(9)]
    assert pauses == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert budget.note_death(0.2, ERROR, num_steps=8) == 0.0


def test_deaths_without_a_step_end_the_engine_after_a_minute() -> None:
    budget = DeathBudget()
    now_s, num_deaths = 0.0, 0
    error: WorkerError | None = None
    while error is None:
        try:
            now_s += 4.0 + budget.note_death(now_s, ERROR, num_steps=0)
            num_deaths += 1
        except WorkerError as spent:
            error = spent
    assert "without finishing a step" in str(error)
    assert 60.0 <= now_s < 75.0
    assert num_deaths >= 5


def test_an_engine_that_has_run_for_long_may_lose_ranks_for_a_minute() -> None:
    budget = DeathBudget()
    for number in range(12):
        budget.note_death(5000.0 + 5.0 * number, ERROR, num_steps=7)
    with pytest.raises(WorkerError, match="died 13 times in 60 s without finishing a step"):
        budget.note_death(5060.0, ERROR, num_steps=7)


def test_a_slow_start_gets_five_tries() -> None:
    budget = DeathBudget()
    for now_s in (0.0, 30.0, 60.0, 90.0):
        budget.note_death(now_s, ERROR, num_steps=3)
    with pytest.raises(WorkerError):
        budget.note_death(120.0, ERROR, num_steps=3)


def test_deaths_that_narrow_a_search_do_not_count_as_barren() -> None:
    budget = DeathBudget()
    budget.note_death(0.0, ERROR, num_steps=0)
    budget.note_death(15.0, ERROR, num_steps=0)
    for number in range(10):
        now_s = 30.0 + 15.0 * number
        assert budget.note_death(now_s, ERROR, num_steps=0, has_narrowed=True) == 0.0


def test_a_death_that_narrows_a_search_is_followed_by_no_pause() -> None:
    budget = DeathBudget()
    pauses = [budget.note_death(0.1, ERROR, num_steps=7) for _ in range(4)]
    assert pauses[-1] == 2.0
    assert budget.note_death(0.1, ERROR, num_steps=7, has_narrowed=True) == 0.0
