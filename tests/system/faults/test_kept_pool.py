"""Prefixes in the CPU pool are found after the death of a rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pagedray import LLM
from tests.fakes import wait_for
from tests.greedy import LONGEST, Truth, generated, settled_stats, truth_of
from tests.small_models.checkpoints import CASES
from tests.system.rank_group import open_group
from tests.system.rank_processes import rank_processes, serving_processes
from tests.system.server_process import TINY_LLAMA


@pytest.fixture
def truth(tmp_path: Path) -> Truth:
    return truth_of(CASES[0], tmp_path)


def open_small_pool(truth: Truth, **options: Any) -> LLM:  # Any: engine options of any type
    """Return an engine whose device pool has room for one sequence."""
    return open_group(
        truth.folder,
        block_size=4,
        num_blocks=-(-LONGEST // 4) + 1,
        num_cpu_blocks=256,
        max_num_seqs=1,
        max_model_len=LONGEST,
        preemption="swap",
        **options,
    )


def kill_last_rank(llm: LLM) -> None:
    """Kill a rank once no copy is under way."""
    settled_stats(llm)
    serving_processes()[-1].kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(1, {}), (2, {}), (1, {"spare_ranks": 1})],
    ids=["one", "two", "spare"],
)
def test_prefixes_outlive_a_rank_and_give_the_same_tokens(
    truth: Truth, num_ranks: int, options: dict[str, Any], ray_cluster: None
) -> None:
    with open_small_pool(truth, num_ranks=num_ranks, **options) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        num_hits = 0
        for _ in range(2):
            kill_last_rank(llm)
            before = llm.stats().scheduler
            assert generated(llm, truth.prompts) == truth.continuations
            after = llm.stats().scheduler
            assert after.num_kept_cpu_blocks > before.num_kept_cpu_blocks
            assert after.num_kept_hit_tokens > num_hits
            num_hits = after.num_kept_hit_tokens
        assert llm.stats().replacements["death"] == 2


def damage_pools() -> None:
    """Overwrite the first half of the CPU pools of the ranks, whose memory this process has."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            is_pool = str(link.readlink()).startswith("/memfd:pagedray-cpu-pool-")
        except FileNotFoundError:
            # Of the listing itself.
            continue
        if is_pool:
            descriptor = int(link.name)
            os.pwrite(descriptor, b"\x3f" * (os.fstat(descriptor).st_size // 2), 0)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_damaged_blocks_are_found_by_their_checksums(
    truth: Truth, num_ranks: int, ray_cluster: None
) -> None:
    with open_small_pool(truth, num_ranks=num_ranks, cpu_pool_checksums=True) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        kill_last_rank(llm)
        assert generated(llm, truth.prompts) == truth.continuations
        stats = settled_stats(llm)
        assert stats.num_kept_hit_tokens > 0
        assert stats.num_damaged_cpu_blocks == 0
        if num_ranks == 1:
            damage_pools()
            kill_last_rank(llm)
            assert generated(llm, truth.prompts) == truth.continuations
            assert llm.stats().scheduler.num_damaged_cpu_blocks > 10


@pytest.mark.slow
def test_prefixes_of_other_weights_are_dropped(truth: Truth, ray_cluster: None) -> None:
    with open_small_pool(truth, num_ranks=1) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        os.utime(truth.folder / "model.safetensors", (1, 1))
        kill_last_rank(llm)
        assert generated(llm, truth.prompts) == truth.continuations
        assert llm.stats().scheduler.num_kept_cpu_blocks == 0
        # They are those of the next rank too.
        kill_last_rank(llm)
        assert generated(llm, truth.prompts) == truth.continuations
        assert llm.stats().scheduler.num_kept_hit_tokens > 0


@pytest.mark.slow
def test_a_start_that_failed_frees_the_pools(truth: Truth, ray_cluster: None) -> None:
    with open_small_pool(truth, num_ranks=1) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        first = serving_processes()[-1]
        kill_last_rank(llm)
        wait_for(lambda: any(one != first for one in rank_processes()))
        for process in rank_processes():
            process.kill()
        assert generated(llm, truth.prompts) == truth.continuations
        assert llm.stats().scheduler.num_kept_cpu_blocks == 0
        kill_last_rank(llm)
        assert generated(llm, truth.prompts) == truth.continuations
        assert llm.stats().scheduler.num_kept_hit_tokens > 0


def computed_tokens(llm: LLM, prompts: list[list[int]]) -> int:
    """Return how many tokens the ranks compute for prompts, and for eight tokens after each."""
    before = settled_stats(llm).num_scheduled_tokens
    generated(llm, prompts, 8)
    return llm.stats().scheduler.num_scheduled_tokens - before


@pytest.mark.slow
def test_prompts_that_come_back_after_a_death_are_not_computed_again(ray_cluster: None) -> None:
    prompts = [[5 + number, *[57 - number] * 399] for number in range(40)]
    with open_group(
        TINY_LLAMA,
        num_ranks=1,
        dtype="float32",
        num_blocks=60,
        num_cpu_blocks=1200,
        max_num_seqs=2,
        max_model_len=512,
        preemption="swap",
    ) as llm:
        first, again = computed_tokens(llm, prompts), computed_tokens(llm, prompts)
        kill_last_rank(llm)
        after = computed_tokens(llm, prompts)
    assert again == after < first / 10
