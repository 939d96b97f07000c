"""Ranks in virtual time behind the framing of the step channel.

Rank 0 is the worker of `tests/scheduling/fake_worker.py`, which checks what it reads; the others
acknowledge steps. Copies between the pools end up to a few steps after the step that has them, and
each rank reports its reads and writes of files a while later, some of which fail. The CPU pool of
ranks that die outlives them or not, and may be damaged.
"""

from __future__ import annotations

import math
import random
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from cluster.engine.executor import Executor, RankHealth
from cluster.engine.ranks.disk_reports import DiskReports
from cluster.engine.ranks.pool_memories import PoolMemories
from pagedray.batch import DiskReport, StepAck, StepMasks, StepOutput, StepPlan, WorkerFailure
from pagedray.channel import StepChannel
from pagedray.config import AttentionReport, CacheSize
from pagedray.errors import HungRankError, WorkerError
from pagedray.pool_report import PoolReport
from tests.scheduling.fake_worker import Block, FakeWorker
from tests.simulation.virtual_socket import connect_sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pagedray.batch import ControllerMessage, EmbedOutput, EmbedPlan, WorkerMessage
    from tests.simulation.scenario import FaultPlan, Scenario
    from tests.simulation.world import World

__all__ = ["SimulatedRanks"]

_HANG_S = 1.0
"""Time after which a rank that does not answer counts as hung."""
_RESTART_S = 0.2
_FAILED_START_PART = 0.3
"""How often ranks die before they serve, so that others start."""
_NEW_POOL_PART = 0.2
"""How often the pool of a replaced rank is new."""
_DAMAGED_PART = 0.3
"""How often one that outlived its rank has damaged blocks."""


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
        self.tenants: dict[int, str] = {0: "\0"}
        """By seed; the engine's own requests have seed 0."""
        self.bad_sequences: set[tuple[int, int]] = set()
        """Seed and index of sequences that read bad values."""
        self.num_deaths = 0
        self._memories = PoolMemories(scenario.num_ranks)
        self._ranks: list[_Rank] = []
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
        )

    @property
    def attention(self) -> AttentionReport:
        return AttentionReport("none", {})

    @property
    def is_killed(self) -> bool:
        """Whether a request has killed a rank since they started."""
        return any(rank.is_killed for rank in self._ranks)

    @property
    def acknowledged_step(self) -> int:
        self._receive()
        step = min(rank.acknowledged_step for rank in self._ranks)
        self._ranks[0].finish_swaps(step)
        return step

    def take_disk_reports(self) -> list[DiskReport]:
        self._receive()
        for number, rank in enumerate(self._ranks):
            while rank.disk_reports:
                report = rank.disk_reports.popleft()
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
        self._post(plan)

    def send_masks(self, masks: StepMasks) -> None:
        self._post(masks)

    def collect_output(self) -> StepOutput:
        first = self._ranks[0]
        while True:
            self._receive()
            if first.outputs:
                return first.outputs.popleft()
            for rank in self._ranks:
                rank.has_news = False
            self._world.run_until(
                lambda: any(rank.has_news for rank in self._ranks),
                min(rank.hang_s for rank in self._ranks),
            )

    def embed_texts(self, plan: EmbedPlan) -> EmbedOutput:
        raise AssertionError("These ranks have a decoder.")

    def observe_ranks(self, now_s: float) -> RankHealth:
        return RankHealth()

    def restart_ranks(self) -> list[int] | None:
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
        return self._memories.take_damaged()

    def close(self) -> None:
        self._memories.close()
        for rank in self._ranks:
            rank.die()

    def _draw_report(self) -> PoolReport:
        """Return what becomes of the CPU pool of a rank that dies."""
        if self._draws.random() < _NEW_POOL_PART:
            return PoolReport(is_shared=self._draws.random() < 0.5)
        damaged: list[int] = []
        if self._draws.random() < _DAMAGED_PART:
            blocks = range(self._scenario.num_cpu_blocks)
            damaged = [block for block in blocks if self._draws.random() < 0.3]
        return PoolReport(is_shared=True, is_kept=True, damaged=tuple(damaged))

    def _pool_after(self, reports: list[PoolReport]) -> list[Block] | None:
        """Return what is left of the pool, or None: a block without one rank's part is lost."""
        if not all(report.is_kept for report in reports):
            return None
        pool = self._ranks[0].cpu_blocks
        for block in {block for report in reports for block in report.damaged}:
            pool[block] = [None] * self._scenario.block_size
        return pool

    def _start(self, cpu_blocks: list[Block] | None = None) -> None:
        """Start ranks, whose CPU pool is new or outlived others."""
        scenario = self._scenario
        self._disk_reports = DiskReports(scenario.num_ranks)
        self._lost: dict[tuple[bool, int], set[int]] = {}
        """By plan and kind, the disk blocks of which a rank could not read or write its part."""
        self._ranks = [
            _Rank(number, scenario, self._world, self._draws, self._make_worker(cpu_blocks))
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
            tenants=self.tenants,
            bad_lengths={
                client.number: client.bad_length
                for client in scenario.clients
                if client.bad_length is not None
            },
            bad_positions={},
            bad_sequences=self.bad_sequences,
            block_copy_s=scenario.step_s,
            token_s=scenario.step_s / 8,
        )

    def _post(self, message: StepPlan | StepMasks) -> None:
        for rank in self._ranks:
            rank.post(message)

    def _receive(self) -> None:
        """Read what has arrived. Raises WorkerError if a rank is gone, has failed or hangs."""
        for rank in self._ranks:
            rank.receive()
            if self._world.now_s() >= rank.hang_s:
                raise HungRankError("A rank does not answer.")

    def _befall(self, fault: FaultPlan) -> None:
        rank = self._ranks[fault.rank]
        if fault.kind == "death":
            rank.die()
        elif fault.kind == "hang":
            rank.is_hung = True
        else:
            rank.fail()


class _Rank:
    """A process of the group and the controller's end of its channel."""

    def __init__(
        self,
        number: int,
        scenario: Scenario,
        world: World,
        draws: random.Random,
        worker: FakeWorker,
    ) -> None:
        self._number = number
        self._world = world
        self._draws = draws
        self._worker = worker
        self._step_s = scenario.step_s
        self._lethal: Mapping[int, int] = {
            client.number: client.lethal_length
            for client in scenario.clients
            if client.lethal_length is not None
        }
        one, other = connect_sockets(world, draws, delay_s=scenario.channel_delay_s)
        one.on_arrival, other.on_arrival = self._note_news, self._serve
        self.channel: StepChannel[ControllerMessage, WorkerMessage] = StepChannel(
            one,  # type: ignore[arg-type]  # it has what channels use
            StepOutput | StepAck | DiskReport | WorkerFailure,
        )
        self._own_end: StepChannel[WorkerMessage, ControllerMessage] = StepChannel(
            other,  # type: ignore[arg-type]
            StepPlan | StepMasks,
        )
        self.outputs: deque[StepOutput] = deque()
        self.held_rows: deque[set[int]] = deque()
        """Of plans that rank 0 has not run."""
        self.disk_reports: deque[DiskReport] = deque()
        self.acknowledged_step = -1
        self.hang_s = math.inf
        """When it counts as hung unless it answers."""
        self._posted_step = -1
        self._num_disk_jobs = 0
        """Reads and writes of plans that it has not reported."""
        self.is_hung = False
        self.has_news = False
        self.is_killed = False
        self._is_dead = False
        self._is_busy = False
        self._copying: deque[int] = deque()
        """Steps that have ended, but whose copies or those of earlier ones have not."""
        self._plans: deque[StepPlan] = deque()
        self._disk_jobs: dict[bool, deque[DiskReport]] = {True: deque(), False: deque()}
        """Reads and writes under way, and what they will report."""
        self._masks: dict[int, StepMasks] = {}
        self._mask_positions: dict[int, int | None] = {}
        """The position from which each row is masked; None is none."""
        self._seeds: dict[int, int] = {}

    def post(self, message: StepPlan | StepMasks) -> None:
        """Send a message to the rank. Raises WorkerError if it is gone."""
        if math.isinf(self.hang_s):
            self.hang_s = self._world.now_s() + _HANG_S
        self._posted_step = message.step
        if isinstance(message, StepPlan):
            self._num_disk_jobs += bool(message.disk_reads) + bool(message.disk_writes)
        self.channel.post(message)
        while not self.channel.flush():
            pass

    def receive(self) -> None:
        """Take what has arrived at the controller. Raises WorkerError."""
        for message in self.channel.received():
            if isinstance(message, WorkerFailure):
                raise WorkerError("A rank failed.", details=message.text)
            assert isinstance(message, StepOutput | StepAck | DiskReport)
            if isinstance(message, DiskReport):
                self.disk_reports.append(message)
                self._num_disk_jobs -= 1
            elif isinstance(message, StepAck) or message.is_acknowledged:
                assert message.step == self.acknowledged_step + 1
                self.acknowledged_step = message.step
            # One that only copies blocks is noticed too, since its process beats no more.
            is_idle = self.acknowledged_step == self._posted_step and not self._num_disk_jobs
            self.hang_s = math.inf if is_idle else self._world.now_s() + _HANG_S
            if isinstance(message, StepOutput):
                self.outputs.append(message)

    @property
    def cpu_blocks(self) -> list[Block]:
        """The CPU pool, in which copies that had not ended left nothing."""
        return self._worker.cpu

    def finish_swaps(self, step: int) -> None:
        """Make the copies of steps that every rank has finished."""
        self._worker.finish_swaps(step)

    def end_disk_job(self, report: DiskReport) -> None:
        """Do what every rank has reported."""
        self._worker.end_disk_job(report)

    def die(self) -> None:
        if not self._is_dead:
            self._is_dead = True
            self._own_end.close()

    def fail(self) -> None:
        """End as a rank does that has no memory left."""
        if not self._is_dead and not self.is_hung:
            self._own_end.post(WorkerFailure("OutOfMemoryError"))
            self._is_dead = True

    def _note_news(self) -> None:
        self.has_news = True

    def _serve(self) -> None:
        """Take what has arrived at the rank, and begin a step."""
        if self._is_dead or self.is_hung:
            return
        for message in self._own_end.received():
            if isinstance(message, StepPlan):
                self._plans.append(message)
                self._begin_disk_jobs(message)
            else:
                assert isinstance(message, StepMasks)
                self._masks[message.step] = message
        self._begin_step()

    def _begin_disk_jobs(self, plan: StepPlan) -> None:
        if self._number == 0:
            self._worker.begin_disk_jobs(plan)
        for is_read, blocks in (
            (True, [copy.source for copy in plan.disk_reads]),
            (False, [copy.target for copy in plan.disk_writes]),
        ):
            if not blocks:
                continue
            is_bad = self._draws.random() < 0.1
            failed = [block for block in blocks if is_bad and self._draws.random() < 0.5]
            self._disk_jobs[is_read].append(DiskReport(plan.step, is_read, failed, self._step_s))
            self._world.call_later(
                self._step_s * 8 * self._draws.random(),
                lambda is_read=is_read: self._end_disk_jobs(plan.step, is_read=is_read),  # type: ignore[misc]
            )

    def _end_disk_jobs(self, step: int, *, is_read: bool) -> None:
        """Report reads or writes up to those of `step`, which run in order."""
        if self._is_dead or self.is_hung:
            return
        jobs = self._disk_jobs[is_read]
        while jobs and jobs[0].step <= step:
            self._send(jobs.popleft())

    def _begin_step(self) -> None:
        if self._is_busy or not self._plans:
            return
        plan = self._plans[0]
        for start in plan.starts:
            self._mask_positions[start.row] = (
                None if start.mask_start is None else start.num_prompt_tokens + start.mask_start
            )
            self._seeds[start.row] = start.seed
        masked = [
            one.row
            for one in plan.sequences
            if one.is_sampled and self._is_masked(one.row, one.first_position + one.num_tokens)
        ]
        if masked and plan.step not in self._masks:
            return
        self._plans.popleft()
        late_rows: set[int] = set()
        if masked:
            masks = self._masks.pop(plan.step)
            words = masks.words
            assert len(words) == len(masked)
            for index in masks.released:
                self._mask_positions[masked[index]] = None
            late_rows = {row for row, word in zip(masked, words, strict=True) if not word}
        self._is_busy = True
        delay_s = self._step_s * (0.5 + self._draws.random())
        self._world.call_later(delay_s, lambda: self._end_step(plan, late_rows))

    def _is_masked(self, row: int, position: int) -> bool:
        first = self._mask_positions[row]
        return first is not None and position >= first

    def _end_step(self, plan: StepPlan, late_rows: set[int]) -> None:
        if self._is_dead or self.is_hung:
            return
        for one in plan.sequences:
            length = one.first_position + one.num_tokens
            if self._lethal.get(self._seeds[one.row]) == length:
                self.is_killed = True
                self.die()
                return
        if self._number == 0:
            worker = self._worker
            worker.late_rows[plan.step] = late_rows
            worker.send(plan, self.held_rows.popleft(), set())
            worker.execute()
            worker.bad_outputs.clear()
        has_copies = bool(plan.evictions or plan.swap_outs or plan.swap_ins)
        is_copying = bool(self._copying) or (has_copies and self._draws.random() < 0.5)
        if self._number == 0:
            output = self._worker.outputs.popleft()
            self._send(msgspec.structs.replace(output, is_acknowledged=not is_copying))
        elif not is_copying:
            self._send(StepAck(plan.step))
        if is_copying:
            self._copying.append(plan.step)
            delay_s = self._step_s * 4 * self._draws.random()
            self._world.call_later(delay_s, lambda: self._end_copies(plan.step))
        self._is_busy = False
        self._begin_step()

    def _end_copies(self, step: int) -> None:
        """Acknowledge steps up to `step`; copies run in order."""
        if self._is_dead or self.is_hung:
            return
        while self._copying and self._copying[0] <= step:
            self._send(StepAck(self._copying.popleft()))

    def _send(self, message: StepOutput | StepAck | DiskReport) -> None:
        self._own_end.post(message)
        while not self._own_end.flush():
            pass
