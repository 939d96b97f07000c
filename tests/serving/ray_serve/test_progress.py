"""When an engine counts as stuck."""

from __future__ import annotations

import pytest

from cluster.serving.ray_serve.progress import ProgressWatch


@pytest.fixture
def watch() -> ProgressWatch:
    return ProgressWatch(stall_timeout_s=60.0, replace_timeout_s=600.0)


def look(
    watch: ProgressWatch,
    now_s: float,
    *,
    num_steps: int = 5,
    has_work: bool = True,
    is_healthy: bool = True,
) -> str | None:
    return watch.problem(num_steps=num_steps, has_work=has_work, is_healthy=is_healthy, now_s=now_s)


def test_work_without_steps_is_a_stall(watch: ProgressWatch) -> None:
    assert look(watch, 0) is None
    assert look(watch, 60) is None
    assert look(watch, 61) == "The engine has work but ran no step for 60 s."


def test_steps_are_progress(watch: ProgressWatch) -> None:
    assert all(look(watch, 50.0 * number, num_steps=number) is None for number in range(50))


def test_an_idle_engine_is_not_stuck(watch: ProgressWatch) -> None:
    assert look(watch, 0, has_work=False) is None
    assert look(watch, 10_000, has_work=False) is None
    # Its first request has just arrived.
    assert look(watch, 10_001) is None
    assert look(watch, 10_062) is not None


def test_replacing_ranks_may_take_long_but_not_forever(watch: ProgressWatch) -> None:
    assert look(watch, 0) is None
    assert look(watch, 100, is_healthy=False) is None
    assert look(watch, 600, is_healthy=False) is None
    assert look(watch, 601, is_healthy=False) == ("The ranks could not be replaced within 600 s.")
    # The first step of replaced ranks has the same time limit.
    assert look(watch, 602) is None
    assert look(watch, 661) is None
    assert look(watch, 663) is not None
