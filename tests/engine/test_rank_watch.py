"""The rule that finds hung ranks, with a simulated clock: thousands of random runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from cluster.engine.rank_monitor import RankWatch, WatchLimits, WorkInFlight
from pagedray.rank_progress import Phase, RankReport

TICK_S = 0.25
BEAT_S = 0.5
NUM_LAYERS = 4
LIMITS = WatchLimits()


@dataclass
class SimulatedRank:
    """Runs one plan after the other: a word for each layer, a heartbeat every half second."""

    layer_s: float
    now_s: float = 0.0
    """Time that its process has run."""
    word: int = 1
    count: int = 1
    num_finished: int = 0
    is_stuck: bool = False
    """Its step no longer progresses, but its process runs."""
    is_compiling: bool = False
    left_s: float = field(init=False)
    layer: int = 0

    def __post_init__(self) -> None:
        self.left_s = self.layer_s

    def run(self, elapsed_s: float) -> None:
        """Let the process run for some time."""
        self.now_s += elapsed_s
        if self.is_stuck:
            return
        self.left_s -= elapsed_s
        if self.left_s <= 0.0:
            num_layers = 1 + int(-self.left_s / self.layer_s)
            self.left_s += num_layers * self.layer_s
            self.layer += num_layers
            self.num_finished += self.layer // NUM_LAYERS
            self.layer %= NUM_LAYERS
            self.enter(Phase.LAYER)

    def report(self) -> RankReport:
        return RankReport(
            word=self.word,
            num_beats=1 + int(self.now_s / BEAT_S),
            num_finished=self.num_finished,
            is_compiling=self.is_compiling,
            pid=1,
        )

    def enter(self, phase: Phase) -> None:
        self.count += 1
        self.word = self.count << 24 | self.layer << 8 | phase


class Simulation:
    """Ranks, a clock that everybody shares, and the watch that observes them."""

    def __init__(self, *, layer_s: float, num_ranks: int = 2, first_s: float = 60.0) -> None:
        self.ranks = [SimulatedRank(layer_s) for _ in range(num_ranks)]
        self.watch = RankWatch(WatchLimits(first_s=first_s))
        self.work = WorkInFlight()
        self.now_s = 1000.0
        self._kind: object = "decode"

    def set_step(self, kind: object, layer_s: float) -> None:
        """Plans sent from now on are of this kind; those in flight end at once."""
        self._kind = kind
        # How long they took says nothing about their kind.
        self.work.take_finished(self.work.num_plans)
        for rank in self.ranks:
            rank.layer_s = rank.left_s = layer_s
            rank.num_finished, rank.layer = self.work.num_plans, 0
            rank.enter(Phase.LAYER)
        self._plan()

    def run_for(self, seconds: float, *, stopped: frozenset[int] = frozenset()) -> list[int]:
        """Let everything run but the stopped ranks; return the first ranks that are blamed."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            if hung := self.tick(TICK_S, stopped=stopped):
                return hung
        return []

    def tick(self, elapsed_s: float, *, stopped: frozenset[int] = frozenset()) -> list[int]:
        """Let time pass until the watch observes once."""
        self.now_s += elapsed_s
        for rank, process in enumerate(self.ranks):
            if rank not in stopped:
                process.run(elapsed_s)
        self._plan()
        return self.watch.hung_ranks(self.now_s, [r.report() for r in self.ranks], self.work)

    def pause_everything(self, seconds: float) -> None:
        """Let time pass in which neither a rank nor the watch runs."""
        self.now_s += seconds

    def _plan(self) -> None:
        first = max(rank.num_finished for rank in self.ranks)
        for step in range(max(self.work.num_plans, first), first + 2):
            self.work.add_plan(step, self._kind)


@pytest.mark.parametrize("num_runs", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_steps_with_pauses_are_never_blamed(num_runs: int) -> None:
    """Runs of changing step times, pauses of everything, and short stops of a rank."""
    for seed in range(num_runs):
        generator = random.Random(seed)
        layer_s = 10 ** generator.uniform(-3, 1)
        simulation = Simulation(layer_s=layer_s, num_ranks=generator.choice([1, 2, 8]))
        for _ in range(generator.randint(2, 8)):
            event = generator.random()
            if event < 0.3:
                simulation.pause_everything(generator.uniform(0.0, 3600.0))
                assert not simulation.tick(TICK_S)
            elif event < 0.5:
                # Steps of a kind keep their duration to within a factor of two.
                kind = generator.randrange(10)
                layer_s = 10 ** (kind / 2 - 3) * generator.uniform(1.0, 2.0)
                simulation.set_step(kind, layer_s)
            elif event < 0.6 and layer_s < 1.0:
                stopped = frozenset({generator.randrange(len(simulation.ranks))})
                assert not simulation.run_for(LIMITS.beat_s / 2, stopped=stopped)
            # An observer that runs late, in part.
            for _ in range(generator.randint(5, 50)):
                assert not simulation.tick(generator.choice([TICK_S] * 9 + [2.0]))


@pytest.mark.parametrize("num_runs", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_hang_is_found_within_ten_seconds(num_runs: int) -> None:
    for seed in range(num_runs):
        generator = random.Random(seed)
        simulation = Simulation(
            layer_s=10 ** generator.uniform(-3, 0), num_ranks=generator.choice([1, 2, 8])
        )
        simulation.run_for(generator.uniform(20.0, 60.0))
        for _ in range(generator.randint(0, 3)):
            simulation.pause_everything(generator.uniform(0.0, 100.0))
            simulation.run_for(generator.uniform(1.0, 5.0))
        victim = generator.randrange(len(simulation.ranks))
        hung_s = simulation.now_s
        if generator.random() < 0.5:
            found = simulation.run_for(20.0, stopped=frozenset({victim}))
        else:
            # It computes forever; the others wait for it.
            for rank, process in enumerate(simulation.ranks):
                process.is_stuck = True
                if rank != victim:
                    process.enter(Phase.ALL_REDUCE)
            found = simulation.run_for(20.0)
        assert found == [victim]
        assert simulation.now_s - hung_s <= 10.0


def test_slow_layers_get_several_times_what_they_took() -> None:
    simulation = Simulation(layer_s=5.0)
    assert not simulation.run_for(200.0)
    for rank in simulation.ranks:
        rank.is_stuck = True
    assert not simulation.run_for(15.0)
    assert simulation.run_for(20.0) == [0, 1]


def test_one_slow_step_does_not_raise_the_limit_for_ever() -> None:
    simulation = Simulation(layer_s=0.01)
    simulation.run_for(10.0)
    simulation.set_step("decode", 5.0)
    simulation.run_for(20.0)
    simulation.set_step("decode", 0.01)
    simulation.run_for(20.0)
    simulation.ranks[0].is_stuck = True
    simulation.ranks[1].enter(Phase.ALL_REDUCE)
    simulation.ranks[1].is_stuck = True
    assert simulation.run_for(8.0) == [0]


def test_first_step_of_a_kind_may_compile() -> None:
    simulation = Simulation(layer_s=0.01, first_s=60.0)
    simulation.run_for(10.0)
    simulation.set_step("prompt", 40.0)
    assert not simulation.run_for(NUM_LAYERS * 40.0 + 10.0)
    for rank in simulation.ranks:
        rank.is_stuck = True
    # Silences of 40 s are known by now.
    assert not simulation.run_for(120.0)
    assert simulation.run_for(120.0) == [0, 1]


def test_compiler_in_another_process_has_ten_minutes() -> None:
    simulation = Simulation(layer_s=0.01)
    simulation.run_for(10.0)
    for rank in simulation.ranks:
        rank.is_stuck = rank.is_compiling = True
    assert not simulation.run_for(590.0)
    assert simulation.run_for(20.0) == [0, 1]


def test_stopped_process_is_found_while_it_would_compile() -> None:
    simulation = Simulation(layer_s=0.01)
    simulation.run_for(10.0)
    simulation.ranks[1].is_compiling = True
    assert simulation.run_for(10.0, stopped=frozenset({1})) == [1]


def test_idle_ranks_need_no_progress_but_a_heartbeat() -> None:
    simulation = Simulation(layer_s=0.01)
    simulation.run_for(10.0)
    for rank in simulation.ranks:
        rank.num_finished = simulation.work.num_plans
        rank.is_stuck = True
    reports_s = simulation.now_s
    for _ in range(4000):
        reports_s += TICK_S
        for rank in simulation.ranks:
            rank.run(TICK_S)
        reports = [rank.report() for rank in simulation.ranks]
        assert not simulation.watch.hung_ranks(reports_s, reports, simulation.work)


def test_rank_that_waits_for_masks_is_not_blamed() -> None:
    simulation = Simulation(layer_s=0.01)
    simulation.run_for(10.0)
    for rank in simulation.ranks:
        rank.enter(Phase.MASKS)
        rank.is_stuck = True
    assert not simulation.run_for(300.0)


def test_clock_that_jumps_back_is_harmless() -> None:
    simulation = Simulation(layer_s=0.01)
    simulation.run_for(10.0)
    simulation.now_s -= 500.0
    assert not simulation.run_for(10.0)
