"""Requests survive the death of a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.engine.ray_ranks import RayRanks
from pagedray import LLM
from pagedray.errors import EngineError
from tests.small_models.checkpoints import CASES, save_checkpoint
from tests.system.rank_group import kill_after_steps, open_group, tokens_of
from tests.system.rank_processes import rank_processes
from workers.parallel.rendezvous import GroupAddress


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(CASES[0], folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path, ray_cluster: None) -> Iterator[LLM]:
    """The engine of all tests here; the last one ends it."""
    with open_group(folder, enable_prefix_cache=False) as llm:
        yield llm


def kill_first_that_is_not(old: list[psutil.Process]) -> None:
    """Kill a rank of the next group while it starts."""
    while not (found := [rank for rank in rank_processes() if rank not in old]):
        time.sleep(0.005)
    found[0].kill()


def test_streams_continue_where_they_were(llm: LLM) -> None:
    undisturbed = tokens_of(llm)
    survivor, victim = rank_processes()
    kill_after_steps(llm, 20, [victim])
    assert tokens_of(llm) == undisturbed
    assert not victim.is_running()
    # The other rank keeps its process, and with it its weights.
    assert survivor in rank_processes()
    assert len(rank_processes()) == 2
    stats = llm.stats().scheduler
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.slow
def test_death_during_a_replacement_is_recovered_too(llm: LLM) -> None:
    undisturbed = tokens_of(llm)
    old = rank_processes()
    old[0].kill()
    killer = threading.Thread(target=kill_first_that_is_not, args=(old,))
    killer.start()
    assert tokens_of(llm) == undisturbed
    killer.join()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_death_while_the_ranks_connect_is_recovered_too(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    undisturbed = tokens_of(llm)
    join = RayRanks._join
    pids: list[int] = []

    def kill_and_join(ranks: RayRanks, address: GroupAddress) -> None:
        if not pids:
            pids.append(ranks._reports.read()[rank].pid)
            os.kill(pids[0], signal.SIGKILL)
        join(ranks, address)

    monkeypatch.setattr(RayRanks, "_join", kill_and_join)
    rank_processes()[1].kill()
    assert tokens_of(llm) == undisturbed
    assert pids
    stats = llm.stats().scheduler
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.slow
def test_rank_that_cannot_leave_its_group_is_replaced_too(llm: LLM) -> None:
    undisturbed = tokens_of(llm)
    old = rank_processes()
    old[0].suspend()
    old[1].kill()
    assert tokens_of(llm) == undisturbed
    assert not set(old) & set(rank_processes())


@pytest.mark.slow
def test_engine_that_cannot_recover_reports_it(llm: LLM, folder: Path) -> None:
    tokens_of(llm)
    # The new ranks find no checkpoint.
    (folder / "model.safetensors").unlink()
    rank_processes()[0].kill()
    with pytest.raises(EngineError, match=r"model\.safetensors|holds no"):
        tokens_of(llm)
