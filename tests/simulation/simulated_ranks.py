"""A group of ranks in virtual time, and the faults that a scenario has for them.

The CPU pool of ranks that die outlives them or not. Some reads and writes of files fail.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from cluster.engine.executor import Executor, RankHealth
from cluster.engine.rank_channels import DiskReports
from cluster.engine.rank_places import PoolMemories
from pagedray.config import CacheSize, KernelReport
from pagedray.errors import HungRankError
from pagedray.rank_progress import PoolReport
from tests.scheduling.fake_worker import Block, FakeWorker, SeedRecords
from tests.simulation.simulated_rank import SimulatedRank

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.batch import DiskReport, StepMasks, StepOutput, StepPlan
    from tests.simulation.scenario import FaultPlan, Scenario
    from tests.simulation.world import World

__all__ = ["SimulatedRanks"]

_RESTART_S = 0.2
_FAILED_START_PART = 0.3
"""How often ranks die before they serve, so that others start."""
_NEW_POOL_PART = 0.2
"""How often the pool of a replaced rank is new."""


class SimulatedRanks(Executor):
    """A group of ranks, and their faults."""

    def __init__(
        self, scenario: Scenario, world: World, *, held_rows: Callable[[], set[int]]
    ) -> None:
        """`held_rows` returns the rows that sequences have after the plan that is being sent."""
        self._scenario = scenario
        self._world = world
        self._held_rows = held_rows
        self._draws = random.Random(scenario.seed)
        bad_lengths = {
            client.number: client.bad_length
            for client in scenario.clients
            if client.bad_length is not None
        }
        # The engine's own requests have seed 0.
        self.seeds = SeedRecords(tenants={0: "\0"}, bad_lengths=bad_lengths)
        self.num_deaths = 0
        self.num_overlapped = 0
        self._memories = PoolMemories(scenario.num_ranks)
        self._ranks: list[SimulatedRank] = []
        for fault in scenario.faults:
            # The time of a world does not start at 0.
            world.call_later(fault.time_s, lambda fault=fault: self._befall(fault))  # type: ignore[misc]
        self._start()

    @property
    def cache_size(self) -> CacheSize:
        return CacheSize(
            num_blocks=self._scenario.num_blocks,
            num_cpu_blocks=self._scenario.num_cpu_blocks,
            block_bytes=1,
            groups=self._scenario.windows,
            state_blocks=self._scenario.state_blocks,
            state_grid=self._scenario.state_grid,
        )

    @property
    def kernels(self) -> KernelReport:
        return KernelReport("none", {})

    @property
    def is_killed(self) -> bool:
        """Whether a request has killed a rank since they started."""
        return any(rank.is_killed for rank in self._ranks)

    def poll_ranks(self) -> tuple[int, list[DiskReport]]:
        self._receive()
        step = min(rank.controller_end.acknowledged_step for rank in self._ranks)
        self._ranks[0].finish_swaps(step)
        return step, self._take_disk_reports()

    def _take_disk_reports(self) -> list[DiskReport]:
        for number, rank in enumerate(self._ranks):
            disk_reports = rank.controller_end.disk_reports
            while disk_reports:
                report = disk_reports.popleft()
                self._lost.setdefault((report.is_read, report.step), set()).update(report.failed)
                self._disk_reports.add_report(number, report)
        joined = self._disk_reports.take_joined()
        for report in joined:
            # A block that one rank lacks is of no use on the others.
            lost = sorted(self._lost.pop((report.is_read, report.step)))
            self._ranks[0].end_disk_job(msgspec.structs.replace(report, failed=lost))
        return joined

    def submit_plan(self, plan: StepPlan) -> None:
        self._ranks[0].held_rows.append(self._held_rows())
        self.num_overlapped += plan.is_overlapped
        self._post(plan)

    def send_masks(self, masks: StepMasks) -> None:
        self._post(masks)

    def collect_output(self) -> StepOutput:
        outputs = self._ranks[0].controller_end.outputs
        while True:
            self._receive()
            if outputs:
                return outputs.popleft()
            for rank in self._ranks:
                rank.controller_end.has_news = False
            self._world.run_until(
                lambda: any(rank.controller_end.has_news for rank in self._ranks),
                min(rank.controller_end.hang_s for rank in self._ranks),
            )

    def observe_ranks(self, now_s: float) -> RankHealth:
        return RankHealth()

    def restart_ranks(self) -> bool:
        self.num_deaths += 1
        for rank in self._ranks:
            rank.die()
        self._world.run_until(lambda: False, self._world.now_s() + _RESTART_S)
        num_starts = 2 if self._draws.random() < _FAILED_START_PART else 1
        starts = [
            [self._draw_report() for _ in range(self._scenario.num_ranks)]
            for _ in range(num_starts)
        ]
        for reports in starts:
            self._memories.note_reports(reports)
        self._start(self._pool_after([one for reports in starts for one in reports]))
        return self._memories.take_kept()

    def close(self) -> None:
        self._memories.close()
        for rank in self._ranks:
            rank.die()

    def _draw_report(self) -> PoolReport:
        """Return what becomes of the CPU pool of a rank that dies."""
        if self._draws.random() < _NEW_POOL_PART:
            return PoolReport(is_shared=self._draws.random() < 0.5)
        return PoolReport(is_shared=True, is_kept=True)

    def _pool_after(self, reports: list[PoolReport]) -> list[Block] | None:
        """Return the pool if every rank has kept its part, or None."""
        return self._ranks[0].cpu_blocks if all(report.is_kept for report in reports) else None

    def _start(self, cpu_blocks: list[Block] | None = None) -> None:
        """Start ranks, whose CPU pool is new or outlived others."""
        scenario = self._scenario
        self._disk_reports = DiskReports(scenario.num_ranks)
        self._lost: dict[tuple[bool, int], set[int]] = {}
        """By plan and kind, the disk blocks of which a rank could not read or write its part."""
        self._ranks = [
            SimulatedRank(number, scenario, self._world, self._draws, self._make_worker(cpu_blocks))
            for number in range(scenario.num_ranks)
        ]

    def _make_worker(self, cpu_blocks: list[Block] | None) -> FakeWorker:
        scenario = self._scenario
        return FakeWorker(
            block_size=scenario.block_size,
            num_blocks=scenario.num_blocks,
            num_cpu_blocks=scenario.num_cpu_blocks,
            cpu_blocks=cpu_blocks,
            num_disk_blocks=scenario.num_disk_blocks,
            max_num_seqs=scenario.max_num_seqs,
            seeds=self.seeds,
            block_copy_s=scenario.step_s,
            token_s=scenario.step_s / 8,
            windows=scenario.windows,
            state_blocks=scenario.state_blocks,
            right=scenario.right,
            max_model_len=scenario.max_model_len,
        )

    def _post(self, message: StepPlan | StepMasks) -> None:
        for rank in self._ranks:
            rank.controller_end.post(message)

    def _receive(self) -> None:
        """Read what has arrived. Raises WorkerError if a rank is gone, has failed or hangs."""
        for rank in self._ranks:
            rank.controller_end.receive()
            if self._world.now_s() >= rank.controller_end.hang_s:
                raise HungRankError("A rank does not answer.")

    def _befall(self, fault: FaultPlan) -> None:
        rank = self._ranks[fault.rank]
        if fault.kind == "death":
            rank.die()
        elif fault.kind == "hang":
            rank.is_hung = True
        else:
            rank.fail()
