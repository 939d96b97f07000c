"""Requests survive the death of a rank."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pagedray import LLM, SamplingParams
from pagedray.errors import EngineError
from tests.checkpoints import CASES, save_checkpoint
from tests.fakes import wait_for
from tests.system.rank_processes import rank_processes, serving_processes

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[5, 6, 7], [11] * 20, list(range(3, 60))]
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=150, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(CASES[0], tmp_path)
    return tmp_path


def opened(folder: Path, *, num_ranks: int = 2, **options: Any) -> LLM:
    """Return an engine, with options of any type."""
    return LLM(
        folder,
        tensor_parallel_size=num_ranks,
        device="cpu",
        num_threads=1,
        show_progress=False,
        **options,
    )


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    generations = llm.generate(PROMPTS, PARAMS, show_progress=False)
    return [generation.completions[0].token_ids for generation in generations]


def kill_when_running(llm: LLM, num_tokens: int, victim: psutil.Process) -> int:
    """Kill a rank after some tokens; return their number."""
    while llm.stats().num_generated_tokens < num_tokens:
        time.sleep(0.005)
    victim.kill()
    return llm.stats().num_generated_tokens


def test_streams_continue_where_they_were(folder: Path, ray_cluster: None) -> None:
    with opened(folder, enable_prefix_cache=False) as llm:
        undisturbed = tokens_of(llm)
        before = llm.stats().num_generated_tokens
        survivor, victim = rank_processes()
        killed_at: list[int] = []
        killer = threading.Thread(
            target=lambda: killed_at.append(kill_when_running(llm, before + 60, victim))
        )
        killer.start()
        disturbed = tokens_of(llm)
        killer.join()
        assert killed_at[0] < before + sum(map(len, disturbed))
        assert disturbed == undisturbed
        # The other rank keeps its process, and with it its weights.
        assert survivor in rank_processes()
        assert len(rank_processes()) == 2
        stats = llm.stats().scheduler
        assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_ranks", "victims"), [(0, 3, [1]), (1, 4, [2]), (1, 4, [0, 3])]
)
def test_larger_group_keeps_the_ranks_that_live(
    tmp_path: Path, ray_cluster: None, case: int, num_ranks: int, victims: list[int]
) -> None:
    save_checkpoint(CASES[case], tmp_path)
    with opened(tmp_path, num_ranks=num_ranks, enable_prefix_cache=False) as llm:
        undisturbed = tokens_of(llm)
        group = serving_processes()
        assert len(group) == num_ranks
        killed = [group[place] for place in victims]
        before = llm.stats().num_generated_tokens

        def kill() -> None:
            kill_when_running(llm, before + 60, killed[0])
            for rank in killed[1:]:
                rank.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        assert tokens_of(llm) == undisturbed
        killer.join()
        assert set(serving_processes()) & set(group) == set(group) - set(killed)
        assert len(serving_processes()) == num_ranks
        stats = llm.stats().scheduler
        assert stats.num_free_blocks == stats.num_blocks


def test_spare_takes_the_place_of_a_dead_rank(folder: Path, ray_cluster: None) -> None:
    with opened(folder, spare_ranks=1) as llm:
        undisturbed = tokens_of(llm)
        wait_for(lambda: len(serving_processes()) == 2, timeout_s=60.0)
        wait_for(lambda: len(rank_processes()) == 3, timeout_s=60.0)
        (spare,) = set(rank_processes()) - set(serving_processes())
        survivor, victim = serving_processes()
        victim.kill()
        assert tokens_of(llm) == undisturbed
        assert set(serving_processes()) == {survivor, spare}
        # The next spare.
        wait_for(lambda: len(rank_processes()) == 3, timeout_s=60.0)
        everything = rank_processes()
    gone, alive = psutil.wait_procs(everything, timeout=15.0)
    assert (len(gone), alive) == (3, [])


@pytest.mark.slow
def test_rank_that_cannot_leave_its_group_is_replaced_too(folder: Path, ray_cluster: None) -> None:
    with opened(folder) as llm:
        undisturbed = tokens_of(llm)
        old = rank_processes()
        old[0].suspend()
        old[1].kill()
        assert tokens_of(llm) == undisturbed
        assert not set(old) & set(rank_processes())


@pytest.mark.slow
def test_twenty_deaths_leave_nothing_behind(folder: Path, ray_cluster: None) -> None:
    with opened(folder, spare_ranks=1) as llm:
        undisturbed = tokens_of(llm)
        # Only the first rank stays.
        survivor = serving_processes()[0]
        sizes = []
        for _ in range(20):
            (victim,) = set(serving_processes()) - {survivor}
            victim.kill()
            assert tokens_of(llm) == undisturbed
            wait_for(lambda: len(rank_processes()) == 3, timeout_s=60.0)
            sizes.append((survivor.memory_info().rss, survivor.num_fds(), survivor.num_threads()))
        # The first deaths fill caches of libraries.
        memory, descriptors, threads = zip(*sizes[3:], strict=True)
        assert max(memory) - memory[0] < 8 * 2**20
        assert len(set(descriptors)) == 1
        assert max(threads) - threads[0] <= 1


def test_engine_that_cannot_recover_reports_it(folder: Path, ray_cluster: None) -> None:
    with opened(folder) as llm:
        tokens_of(llm)
        # The new ranks find no checkpoint.
        (folder / "model.safetensors").unlink()
        rank_processes()[0].kill()
        with pytest.raises(EngineError, match=r"model\.safetensors|holds no"):
            tokens_of(llm)


def test_death_during_a_replacement_is_recovered_too(folder: Path, ray_cluster: None) -> None:
    with opened(folder) as llm:
        undisturbed = tokens_of(llm)
        old = rank_processes()
        old[0].kill()
        killer = threading.Thread(target=kill_first_that_is_not, args=(old,))
        killer.start()
        assert tokens_of(llm) == undisturbed
        killer.join()


def kill_first_that_is_not(old: list[psutil.Process]) -> None:
    """Kill a rank of the next group while it starts."""
    while not (found := [rank for rank in rank_processes() if rank not in old]):
        time.sleep(0.005)
    found[0].kill()
