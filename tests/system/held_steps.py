"""An engine whose steps wait for the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.engine.controller import Controller

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from pagedray import LLM, AsyncLLM
    from pagedray.batch import StepOutput

__all__ = ["hold_steps"]


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
