"""Greedy tokens of an engine, and what transformers generates for the same prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagedray import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, Case, greedy_tokens, save_checkpoint

if TYPE_CHECKING:
    from cluster.scheduling.stats import SchedulerStats

__all__ = [
    "NUM_TOKENS",
    "PROMPT_LENGTHS",
    "Truth",
    "checked_until_preempted",
    "generated",
    "truth_of",
]

NUM_TOKENS = 40
NUM_TRIES = 20
PROMPT_LENGTHS = (3, 17, 32, 41, 64, 70)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A checkpoint, prompts, and transformers' greedy continuations of them."""

    folder: Path
    prompts: list[list[int]]
    continuations: list[list[int]]


def truth_of(case: Case, folder: Path) -> Truth:
    """Save the checkpoint of a case and return what transformers generates with it."""
    save_checkpoint(case, folder)
    generator = random.Random(case.name)
    prompts = [
        [generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS
    ]
    # Two prompts share a prefix of several blocks.
    prompts[5][:40] = prompts[4][:40]
    return Truth(
        folder=folder,
        prompts=prompts,
        continuations=greedy_tokens(folder, prompts, NUM_TOKENS),
    )


def generated(llm: LLM, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Return the engine's greedy continuation of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    generations = llm.generate(prompts, params, show_progress=False)
    return [list(generation.completions[0].token_ids) for generation in generations]


def checked_until_preempted(llm: LLM, truth: Truth, *counts: str) -> SchedulerStats:
    """Check runs until one of these counts is above 0, and return the statistics.

    Requests arrive while others run; on a busy machine they may arrive too late to compete.
    """
    for _ in range(NUM_TRIES):
        assert generated(llm, truth.prompts) == truth.continuations
        stats = llm.stats().scheduler
        if any(getattr(stats, count) for count in counts):
            return stats
    pytest.fail(f"None of {counts} in {NUM_TRIES} runs.")
