"""Drafts on two ranks, which are killed meanwhile, change no completion."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pagedray import LLM
from tests.engine.speculation_rig import (
    PARAMETERS,
    TINY_LLAMA,
    OracleDrafter,
    answers,
    noted_chains,
    open_llm,
    sequences_of,
    speculator_of,
)
from tests.fakes import wait_for
from tests.workers.draft_reference import noisy_copy, random_eagle3_folder

if TYPE_CHECKING:
    from pathlib import Path

NAMES = list(PARAMETERS)
TWO_RANKS: dict[str, Any] = {"executor": "ray", "tensor_parallel_size": 2}


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "model"])
def test_drafter_on_two_ranks_drafts_as_on_one(
    kind: str, ray_cluster: None, tmp_path: Path
) -> None:
    if kind == "head":
        head = random_eagle3_folder(
            tmp_path / "head", TINY_LLAMA, layer_ids=(1, 2, 3), draft_vocab_size=500
        )
    else:
        head = noisy_copy(tmp_path / "model", TINY_LLAMA)
    names = ["greedy", "temperature"]
    options: dict[str, Any] = {"dtype": "float32"}
    with open_llm(speculates=True, head=head, **options) as llm:
        expected = answers(llm, names)
        drafted = noted_drafts(llm, names)
    with open_llm(speculates=True, head=head, **TWO_RANKS, **options) as llm:
        assert answers(llm, names) == expected
        found = noted_drafts(llm, names)
        assert found.keys() & drafted.keys()
        assert all(found[key] == drafted[key] for key in found.keys() & drafted.keys())
        killer = threading.Thread(target=kill_a_rank, args=(llm,), kwargs={"after_steps": 5})
        killer.start()
        assert answers(llm, names) == expected
        killer.join()
        assert llm._engine.stats().replacements["death"] == 1


def noted_drafts(llm: LLM, names: list[str]) -> dict[tuple[int, ...], list[int]]:
    """Return the drafts that follow each sequence of tokens, of the completions once more."""
    chains = noted_chains(llm)
    answers(llm, names)
    assert len(chains) > 30
    return {
        tuple(chain.sequence.token_ids[: chain.position + 1]): list(chain.draft_ids)
        for chain, _ in chains
    }
