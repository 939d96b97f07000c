"""The local executor: acknowledged steps, and an interrupt while loading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.engine.local_executor import LocalExecutor
from cluster.engine.options import EngineOptions, engine_config
from pagedray.batch import BlockCopy, SequencePlan, SequenceStart, StepPlan
from pagedray.request import SamplingParams
from tests.system.server_process import TINY_LLAMA

if TYPE_CHECKING:
    from pagedray.config import EngineConfig


def config() -> EngineConfig:
    return engine_config(
        TINY_LLAMA,
        EngineOptions(
            executor="local", device="cpu", num_threads=1, num_blocks=16, num_cpu_blocks=8
        ),
    )


def test_step_reports_the_times_of_its_swaps_and_its_forward_pass() -> None:
    executor = LocalExecutor(config(), lambda what, fraction: None)
    start = SequenceStart(0, [5, 6, 7], 3, [1], SamplingParams(temperature=0.0), 0, 0)
    executor.submit_plan(StepPlan(0, [SequencePlan(0, 0, 3, True)], [start]))
    executor.submit_plan(StepPlan(1, [], swap_outs=[BlockCopy(1, 2)]))
    prefill, swap = executor.collect_output(), executor.collect_output()
    executor.close()
    assert prefill.forward_s > 0.0
    assert prefill.swap_s == 0.0
    assert swap.swap_s > 0.0


def test_loading_ends_soon_after_it_is_interrupted() -> None:
    reported: list[str] = []

    def report(what: str, fraction: float) -> None:
        reported.append(what)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalExecutor(config(), report)
    assert len(reported) == 1
