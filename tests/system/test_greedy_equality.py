"""Greedy tokens equal transformers', whatever the cache and the schedule do to a sequence."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pagedray import LLM, SamplingParams
from tests.checkpoints import CASES, VOCAB_SIZE, Case, greedy_tokens, save_checkpoint

if TYPE_CHECKING:
    from cluster.scheduling.stats import SchedulerStats

NUM_TOKENS = 40
NUM_TRIES = 20
PROMPT_LENGTHS = (3, 17, 32, 41, 64, 70)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A checkpoint and what transformers makes of some prompts with it."""

    folder: Path
    prompts: list[list[int]]
    continuations: list[list[int]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    save_checkpoint(case, folder)
    generator = random.Random(case.name)
    prompts = [
        [generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS
    ]
    # Two prompts begin alike, over several blocks.
    prompts[5][:40] = prompts[4][:40]
    return Truth(
        folder=folder,
        prompts=prompts,
        continuations=greedy_tokens(folder, prompts, NUM_TOKENS),
    )


def generated(llm: LLM, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    generations = llm.generate(prompts, params, show_progress=False)
    return [list(generation.completions[0].token_ids) for generation in generations]


def checked_until_preempted(llm: LLM, truth: Truth, *counts: str) -> SchedulerStats:
    """Check run after run, and return the statistics when one of these counts is no longer 0.

    Requests are taken in while others run already. On a machine that is busy with other things one
    may come so late that it is in nobody's way.
    """
    for _ in range(NUM_TRIES):
        assert generated(llm, truth.prompts) == truth.continuations
        stats = llm.stats().scheduler
        if any(getattr(stats, count) for count in counts):
            return stats
    pytest.fail(f"Not one of {counts} in {NUM_TRIES} runs.")


def local_llm(truth: Truth, **options: Any) -> LLM:  # Any: engine options of any type
    return LLM(
        truth.folder,
        executor="local",
        device="cpu",
        num_threads=1,
        show_progress=False,
        **options,
    )


@pytest.mark.parametrize("block_size", [4, 16])
def test_batch_equals_transformers(truth: Truth, block_size: int) -> None:
    with local_llm(truth, block_size=block_size) as llm:
        assert generated(llm, truth.prompts) == truth.continuations


@pytest.mark.parametrize("block_size", [4, 16])
def test_token_budget_that_forces_chunks_changes_nothing(truth: Truth, block_size: int) -> None:
    with local_llm(truth, block_size=block_size, max_num_batched_tokens=13, max_num_seqs=4) as llm:
        assert generated(llm, truth.prompts) == truth.continuations


@pytest.mark.parametrize("block_size", [4, 16])
def test_prefix_hit_changes_nothing(truth: Truth, block_size: int) -> None:
    with local_llm(truth, block_size=block_size, num_blocks=256, max_num_seqs=1) as llm:
        first = generated(llm, truth.prompts)
        again = generated(llm, truth.prompts)
        num_hit_tokens = llm.stats().scheduler.num_hit_tokens
    assert first == truth.continuations
    assert again == truth.continuations
    # The second round finds every full block of every prompt but the last token's.
    assert num_hit_tokens >= sum(
        (len(prompt) - 1) // block_size * block_size for prompt in truth.prompts
    )


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_tiny_pool_changes_nothing(truth: Truth, block_size: int, preemption: str) -> None:
    longest = max(PROMPT_LENGTHS) + NUM_TOKENS
    with local_llm(
        truth,
        block_size=block_size,
        num_blocks=-(-longest // block_size) + 3,
        num_cpu_blocks=64,
        preemption=preemption,
        enable_prefix_cache=False,
    ) as llm:
        checked_until_preempted(llm, truth, f"num_{preemption}_preemptions")


def test_all_at_once_changes_nothing(truth: Truth) -> None:
    longest = max(PROMPT_LENGTHS) + NUM_TOKENS
    with local_llm(
        truth,
        block_size=4,
        num_blocks=-(-longest // 4) + 5,
        num_cpu_blocks=9,
        max_num_batched_tokens=11,
        max_num_seqs=5,
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        stats = checked_until_preempted(
            llm, truth, "num_swap_preemptions", "num_recompute_preemptions"
        )
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_cpu_blocks == stats.num_cpu_blocks


def test_two_ranks_change_nothing(truth: Truth, ray_cluster: None) -> None:
    longest = max(PROMPT_LENGTHS) + NUM_TOKENS
    with LLM(
        truth.folder,
        tensor_parallel_size=2,
        device="cpu",
        num_threads=1,
        show_progress=False,
        block_size=4,
        num_blocks=-(-longest // 4) + 5,
        num_cpu_blocks=64,
        max_num_batched_tokens=29,
        preemption="swap",
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        # Prefix hits, and blocks that have been elsewhere in between.
        stats = checked_until_preempted(llm, truth, "num_swap_preemptions")
    assert stats.num_hit_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks
