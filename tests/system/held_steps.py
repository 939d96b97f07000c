"""An engine whose steps wait for the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.engine.controller import Controller
from pagedray import LLM, AsyncLLM
from pagedray.batch import StepOutput


def hold_steps(
    llm: LLM | AsyncLLM, monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]
) -> None:
    """Have the engine wait before it takes the output of each step."""
    engine = llm._engine
    assert isinstance(engine, Controller)
    executor = engine._executor
    collect = executor.collect_output

    def wait_and_collect() -> StepOutput:
        wait()
        return collect()

    monkeypatch.setattr(executor, "collect_output", wait_and_collect)
