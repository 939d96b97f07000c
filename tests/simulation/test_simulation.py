"""The controller, scheduler, client and channel in virtual time, among faults of every kind."""

import subprocess
import sys
import time

import pytest

from tests.simulation.planted_bugs import PLANTED_BUGS, PlantedBug
from tests.simulation.run import failure_of, run_scenario
from tests.simulation.scenario import make_scenario, shrink

NUM_SEEDS = 60
NUM_SLOW_SEEDS = 2500
# CPU time: other processes may take most of the cores.
FOUND_WITHIN_S = 60.0


def failures(seeds: range) -> dict[int, str]:
    found = {seed: failure_of(make_scenario(seed)) for seed in seeds}
    return {seed: failure for seed, failure in found.items() if failure}


def test_every_client_gets_its_tokens_and_nothing_is_left() -> None:
    assert failures(range(NUM_SEEDS)) == {}


def test_the_program_runs_seeds_in_other_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seeds", "2", "--processes", "1"],
        capture_output=True,
        text=True,
        timeout=300.0,
        check=True,
    )
    assert done.stdout.startswith("0 of 2 seeds fail")


@pytest.mark.slow
def test_every_client_gets_its_tokens_in_many_runs() -> None:
    assert failures(range(NUM_SEEDS, NUM_SLOW_SEEDS)) == {}


def test_a_seed_is_one_run_among_deaths_and_preemptions() -> None:
    runs = [[run_scenario(make_scenario(seed)) for seed in range(10)] for _ in range(2)]
    assert [one.log for one in runs[0]] == [one.log for one in runs[1]]
    assert sum(one.num_deaths for one in runs[0]) > 3
    assert sum(one.num_preemptions for one in runs[0]) > 3
    # Few runs read from the disk.
    assert any(run_scenario(make_scenario(seed)).num_read_blocks for seed in range(100))


def test_prefixes_are_found_in_pools_that_outlived_ranks() -> None:
    seeds = range(72, 300, 4)
    assert any(run_scenario(make_scenario(seed)).num_kept_hit_tokens for seed in seeds)


def test_a_failing_run_is_shrunk() -> None:
    bug = next(one for one in PLANTED_BUGS if one.name == "siblings write into the same block")
    with bug.planted():
        seed = next(iter(failures(range(20, 30))))
        smallest = shrink(make_scenario(seed), lambda scenario: bool(failure_of(scenario)))
        assert len(smallest.clients) == 1
        assert smallest.clients[0].n > 1
        assert smallest.faults == ()
        assert failure_of(smallest)
    assert not failure_of(smallest)


def test_there_are_90_planted_bugs() -> None:
    assert len({bug.name for bug in PLANTED_BUGS}) == 90
    for bug in PLANTED_BUGS:
        with bug.planted():
            pass


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED_BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_within_a_minute(bug: PlantedBug) -> None:
    end_s = time.process_time() + FOUND_WITHIN_S
    with bug.planted():
        seed = 0
        while not failure_of(make_scenario(seed)):
            seed += 1
            assert time.process_time() < end_s, f"not found by {seed} seeds"
