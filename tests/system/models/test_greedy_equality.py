"""Greedy tokens equal transformers', however the cache and the scheduler treat a sequence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedray import LLM
from tests.greedy import (
    LONGEST,
    Truth,
    check_all_at_once,
    check_cpu_prefixes,
    check_disk_prefixes,
    check_logprobs,
    check_tiny_pool,
    checked_until_preempted,
    generated,
    local_llm,
    small_pool,
    truth_of,
    windows_of,
)
from tests.small_models.checkpoints import Case, class_name
from tests.small_models.family_cases import ALL_CASES, HYBRID_CASES, MOE_CASES, SAMPLED_CASES
from workers.models.families.bert import BERT, ROBERTA
from workers.models.families.registry import FAMILIES

BLOCK_SIZES = (4, pytest.param(16, marks=pytest.mark.slow))
"""The smaller blocks have more boundaries."""


def cases(sampled: Sequence[Case]) -> pytest.MarkDecorator:
    """Return parameters of all cases, of which only some run each time."""
    params = [
        pytest.param(case, id=case.name, marks=[] if case in sampled else pytest.mark.slow)
        for case in ALL_CASES
    ]
    return pytest.mark.parametrize("truth", params, indirect=True)


# Every sampled case runs with everything at once, and every fourth one with each part of it.
EVERY = cases(SAMPLED_CASES)
FIRST, SECOND, THIRD, FOURTH = (cases(SAMPLED_CASES[part::4]) for part in range(4))


@pytest.fixture(scope="module")
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    case: Case = request.param
    return truth_of(case, tmp_path_factory.mktemp(case.name))


def test_every_family_of_decoders_has_a_case() -> None:
    names = {class_name(case) for case in (*ALL_CASES, *HYBRID_CASES)}
    decoders = {family.architecture for family in FAMILIES if family not in (BERT, ROBERTA)}
    assert names == decoders


@FIRST
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_batch_equals_transformers(truth: Truth, block_size: int) -> None:
    with local_llm(truth.folder, block_size=block_size) as llm:
        assert generated(llm, truth.prompts) == truth.continuations


@SECOND
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_token_budget_that_forces_chunks_changes_nothing(truth: Truth, block_size: int) -> None:
    with local_llm(
        truth.folder, block_size=block_size, max_num_batched_tokens=13, max_num_seqs=4
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations


@THIRD
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefix_hit_changes_nothing(truth: Truth, block_size: int) -> None:
    with local_llm(
        truth.folder,
        block_size=block_size,
        num_blocks=256 * len(windows_of(truth, block_size)),
        max_num_seqs=1,
        max_model_len=LONGEST,
    ) as llm:
        first = generated(llm, truth.prompts)
        again = generated(llm, truth.prompts)
        num_hit_tokens = llm.stats().scheduler.num_hit_tokens
    assert first == truth.continuations
    assert again == truth.continuations
    # The second round hits every full block that lacks the prompt's last token.
    assert num_hit_tokens >= sum(
        (len(prompt) - 1) // block_size * block_size for prompt in truth.prompts
    )


@FOURTH
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefix_that_comes_back_from_the_cpu_pool_changes_nothing(
    truth: Truth, block_size: int
) -> None:
    check_cpu_prefixes(local_llm, truth, block_size=block_size)


@FIRST
def test_prefix_that_comes_back_from_the_disk_changes_nothing(truth: Truth, tmp_path: Path) -> None:
    check_disk_prefixes(local_llm, truth, folder=tmp_path)


@SECOND
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_tiny_pool_changes_nothing(truth: Truth, block_size: int, preemption: str) -> None:
    check_tiny_pool(local_llm, truth, block_size=block_size, preemption=preemption)


@EVERY
def test_all_at_once_changes_nothing(truth: Truth) -> None:
    check_all_at_once(local_llm, truth)


@EVERY
def test_logprobs_equal_those_of_transformers(truth: Truth) -> None:
    # Blocks behind windows are cached too, and evicted first.
    is_uniform = windows_of(truth, 4) == (None,)
    with local_llm(
        truth.folder,
        block_size=4,
        num_blocks=-(-LONGEST // 4) + 5 if is_uniform else 1024,
        max_model_len=LONGEST,
        max_num_batched_tokens=11,
        max_num_seqs=5,
    ) as llm:
        check_logprobs(llm, truth)
        check_logprobs(llm, truth)
        assert llm.stats().scheduler.num_hit_tokens > 0


# Ranks take seconds to start.
@pytest.mark.slow
@pytest.mark.parametrize(
    "truth", [pytest.param(case, id=case.name) for case in ALL_CASES], indirect=True
)
def test_two_ranks_change_nothing(truth: Truth, ray_cluster: None) -> None:
    check_two_ranks(truth)


@pytest.mark.slow
@pytest.mark.parametrize(
    "truth", [pytest.param(case, id=case.name) for case in MOE_CASES], indirect=True
)
def test_whole_experts_on_two_ranks_change_nothing(truth: Truth, ray_cluster: None) -> None:
    check_two_ranks(truth, enable_expert_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "truth", [pytest.param(case, id=case.name) for case in SAMPLED_CASES], indirect=True
)
def test_prefixes_that_come_back_from_the_disks_of_two_ranks_change_nothing(
    truth: Truth, ray_cluster: None, tmp_path: Path
) -> None:
    def two_ranks(folder: Path, **options: Any) -> LLM:  # Any: engine options of any type
        return LLM(
            folder,
            tensor_parallel_size=2,
            device="cpu",
            num_threads=1,
            show_progress=False,
            **options,
        )

    check_disk_prefixes(two_ranks, truth, folder=tmp_path)


def check_two_ranks(truth: Truth, **options: Any) -> None:  # Any: engine options of any type
    """Check continuations of two ranks, with prefix hits in both pools and swaps."""
    with LLM(
        truth.folder,
        tensor_parallel_size=2,
        device="cpu",
        num_threads=1,
        show_progress=False,
        **{"max_num_batched_tokens": 29} | small_pool(truth, block_size=4, num_spare=5),
        num_cpu_blocks=256,
        preemption="swap",
        **options,
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        # Prefix hits, also on blocks that were swapped.
        stats = checked_until_preempted(llm, truth, "num_swap_preemptions")
        check_logprobs(llm, truth)
    assert stats.num_hit_tokens > stats.num_cpu_hit_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks
