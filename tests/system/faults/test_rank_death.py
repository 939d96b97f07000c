"""Requests survive the deaths of ranks, with their prefixes in the CPU pool."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from cluster.engine.ray_ranks import RayRanks
from pagedray import LLM
from pagedray.errors import EngineError
from tests.fakes import wait_for
from tests.greedy import Truth, generated, settled_stats, small_pool, truth_of
from tests.small_models.checkpoints import CASES, save_checkpoint
from tests.small_models.family_cases import ALL_CASES
from tests.system.engines import (
    kill_after_steps,
    open_group,
    rank_processes,
    serving_processes,
    tokens_of,
)
from tests.system.server_process import TINY_LLAMA
from workers.parallel.rendezvous import GroupAddress

WINDOWED = next(case for case in ALL_CASES if case.name == "gpt-oss-windows")


@pytest.fixture
def truth(request: pytest.FixtureRequest, tmp_path: Path) -> Truth:
    return truth_of(getattr(request, "param", CASES[0]), tmp_path)


def open_small_pool(truth: Truth, **options: Any) -> LLM:  # Any: engine options of any type
    """Return an engine whose device pool has room for one sequence."""
    return open_group(
        truth.folder,
        **small_pool(truth, block_size=4, num_spare=1) | {"max_num_seqs": 1},
        num_cpu_blocks=512,
        preemption="swap",
        **options,
    )


def kill_last_rank(llm: LLM) -> None:
    """Kill a rank once no copy is under way."""
    settled_stats(llm)
    serving_processes()[-1].kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "num_ranks", "options"),
    [
        (CASES[0], 1, {}),
        (CASES[0], 2, {}),
        (CASES[0], 1, {"spare_ranks": 1}),
        (WINDOWED, 1, {}),
        (WINDOWED, 2, {}),
    ],
    ids=["one", "two", "spare", "one-with-windows", "two-with-windows"],
    indirect=["truth"],
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


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_checkpoint(CASES[0], tmp_path)
    return tmp_path / "model.safetensors"


def exchange(weights: Path, *, factor: float) -> None:
    """Put another file in the place of the weights, with the values of one tensor scaled."""
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.up_proj.weight"] *= factor
    other = weights.with_suffix(".new")
    save_file(tensors, other, metadata={"format": "pt"})
    os.utime(other, (1, 1))
    other.rename(weights)


@pytest.mark.slow
def test_a_group_never_mixes_two_versions_of_its_weights(weights: Path, ray_cluster: None) -> None:
    with open_group(weights.parent) as llm:
        tokens_of(llm)
        exchange(weights, factor=2.0)
        serving_processes()[-1].kill()
        with pytest.raises(EngineError, match=r"model\.safetensors .* rank 0 .* rank 1"):
            tokens_of(llm)


@pytest.mark.slow
def test_a_copy_of_the_weights_is_as_good_as_the_original(weights: Path, ray_cluster: None) -> None:
    with open_group(weights.parent) as llm:
        undisturbed = tokens_of(llm)
        exchange(weights, factor=1.0)
        serving_processes()[-1].kill()
        assert tokens_of(llm) == undisturbed


@pytest.mark.slow
def test_ranks_that_all_load_again_may_load_other_weights(weights: Path, ray_cluster: None) -> None:
    with open_group(weights.parent) as llm:
        before = tokens_of(llm)
        exchange(weights, factor=2.0)
        for rank in serving_processes():
            rank.kill()
        after = tokens_of(llm)
    with open_group(weights.parent) as llm:
        assert tokens_of(llm) == after != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_ranks", "victims"), [(0, 3, [1]), (1, 4, [2]), (1, 4, [0, 3])]
)
def test_larger_group_keeps_the_ranks_that_live(
    tmp_path: Path, ray_cluster: None, case: int, num_ranks: int, victims: list[int]
) -> None:
    save_checkpoint(CASES[case], tmp_path)
    with open_group(tmp_path, num_ranks=num_ranks, enable_prefix_cache=False) as llm:
        undisturbed = tokens_of(llm)
        group = serving_processes()
        assert len(group) == num_ranks
        killed = [group[place] for place in victims]
        kill_after_steps(llm, 20, killed)
        assert tokens_of(llm) == undisturbed
        assert set(serving_processes()) & set(group) == set(group) - set(killed)
        assert len(serving_processes()) == num_ranks
        stats = llm.stats().scheduler
        assert stats.num_free_blocks == stats.num_blocks


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


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared_folder = tmp_path_factory.mktemp("model")
    save_checkpoint(CASES[0], shared_folder)
    return shared_folder


@pytest.fixture(scope="module")
def shared_llm(shared_folder: Path, ray_cluster: None) -> Iterator[LLM]:
    """The engine of all tests here; the last one ends it."""
    with open_group(shared_folder, enable_prefix_cache=False) as shared_llm:
        yield shared_llm


def kill_first_that_is_not(old: list[psutil.Process]) -> None:
    """Kill a rank of the next group while it starts."""
    while not (found := [rank for rank in rank_processes() if rank not in old]):
        time.sleep(0.005)
    found[0].kill()


def test_streams_continue_where_they_were(shared_llm: LLM) -> None:
    undisturbed = tokens_of(shared_llm)
    survivor, victim = rank_processes()
    kill_after_steps(shared_llm, 20, [victim])
    assert tokens_of(shared_llm) == undisturbed
    assert not victim.is_running()
    # The other rank keeps its process, and with it its weights.
    assert survivor in rank_processes()
    assert len(rank_processes()) == 2
    stats = shared_llm.stats().scheduler
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.slow
def test_death_during_a_replacement_is_recovered_too(shared_llm: LLM) -> None:
    undisturbed = tokens_of(shared_llm)
    old = rank_processes()
    old[0].kill()
    killer = threading.Thread(target=kill_first_that_is_not, args=(old,))
    killer.start()
    assert tokens_of(shared_llm) == undisturbed
    killer.join()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_death_while_the_ranks_connect_is_recovered_too(
    shared_llm: LLM, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    undisturbed = tokens_of(shared_llm)
    join = RayRanks._join
    pids: list[int] = []

    def kill_and_join(ranks: RayRanks, address: GroupAddress) -> None:
        if not pids:
            pids.append(ranks._reports.read()[rank].pid)
            os.kill(pids[0], signal.SIGKILL)
        join(ranks, address)

    monkeypatch.setattr(RayRanks, "_join", kill_and_join)
    rank_processes()[1].kill()
    assert tokens_of(shared_llm) == undisturbed
    assert pids
    stats = shared_llm.stats().scheduler
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.slow
def test_rank_that_cannot_leave_its_group_is_replaced_too(shared_llm: LLM) -> None:
    undisturbed = tokens_of(shared_llm)
    old = rank_processes()
    old[0].suspend()
    old[1].kill()
    assert tokens_of(shared_llm) == undisturbed
    assert not set(old) & set(rank_processes())


@pytest.mark.slow
def test_engine_that_cannot_recover_reports_it(shared_llm: LLM, shared_folder: Path) -> None:
    tokens_of(shared_llm)
    # The new ranks find no checkpoint.
    (shared_folder / "model.safetensors").unlink()
    rank_processes()[0].kill()
    with pytest.raises(EngineError, match=r"model\.safetensors|holds no"):
        tokens_of(shared_llm)
