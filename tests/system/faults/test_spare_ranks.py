"""A spare process takes the place of a dead rank."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.fakes import wait_for
from tests.small_models.checkpoints import CASES, save_checkpoint
from tests.system.rank_group import open_group, tokens_of
from tests.system.rank_processes import rank_processes, serving_processes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(CASES[0], tmp_path)
    return tmp_path


@pytest.mark.slow
def test_spare_takes_the_place_of_a_dead_rank(folder: Path, ray_cluster: None) -> None:
    with open_group(folder, spare_ranks=1) as llm:
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
def test_twenty_deaths_leave_nothing_behind(folder: Path, ray_cluster: None) -> None:
    with open_group(folder, spare_ranks=1) as llm:
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
