"""Drafts on two ranks, which are killed meanwhile, change no completion."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from pagedray import LLM
from tests.engine.speculation_rig import (
    PARAMETERS,
    OracleDrafter,
    answers,
    open_llm,
    sequences_of,
    speculator_of,
)
from tests.fakes import wait_for

NAMES = list(PARAMETERS)
TWO_RANKS = {"executor": "ray", "tensor_parallel_size": 2}


def kill_a_rank(llm: LLM, *, after_steps: int) -> None:
    """Kill the second rank once it has run some more steps."""
    engine = llm._engine
    first = engine.stats().num_steps
    wait_for(lambda: engine.stats().num_steps >= first + after_steps)
    ranks = engine._executor._ranks  # type: ignore[attr-defined]  # Ray's
    os.kill(ranks._reports.read()[1].pid, signal.SIGKILL)


@pytest.mark.slow
def test_completions_of_two_ranks_with_drafts_are_those_without(ray_cluster: None) -> None:
    with open_llm(speculates=False, **TWO_RANKS) as plain:
        expected = answers(plain, NAMES)
    with open_llm(speculates=True, **TWO_RANKS) as llm:
        speculator = speculator_of(llm)
        speculator.drafter = OracleDrafter(sequences_of(expected), wrong=0.2)
        assert answers(llm, NAMES) == expected
        for number in range(3):
            killer = threading.Thread(target=kill_a_rank, args=(llm,), kwargs={"after_steps": 5})
            killer.start()
            assert answers(llm, NAMES) == expected
            killer.join()
            assert llm._engine.stats().replacements["death"] == number + 1
    assert speculator.stats().num_accepted_tokens > 1000
    assert speculator.stats().num_refused_tokens > 1000
