"""Greedy tokens equal transformers', however the cache and the scheduler treat a sequence."""

from __future__ import annotations

from typing import Any

import pytest

from pagedray import LLM
from tests.checkpoints import CASES, Case
from tests.greedy import (
    NUM_TOKENS,
    PROMPT_LENGTHS,
    Truth,
    checked_until_preempted,
    generated,
    truth_of,
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    case: Case = request.param
    return truth_of(case, tmp_path_factory.mktemp(case.name))


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
    # The second round hits every full block that lacks the prompt's last token.
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
        # Prefix hits, also on blocks that were swapped.
        stats = checked_until_preempted(llm, truth, "num_swap_preemptions")
    assert stats.num_hit_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks
