"""One rank in virtual time, behind the framing of the step channel.

Rank 0 is the worker of `tests/scheduling/fake_worker.py`, which checks what it reads; the others
acknowledge steps. Copies between the pools end up to a few steps after the step that has them, and
the rank reports its reads and writes of files a while later.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from pagedray.batch import DiskReport, StepAck, StepMasks, StepOutput, StepPlan, WorkerFailure
from pagedray.channel import StepChannel
from tests.simulation.controller_end import ControllerEnd
from tests.simulation.virtual_socket import connect_sockets

if TYPE_CHECKING:
    import random

    from pagedray.batch import ControllerMessage, SequencePlan, WorkerMessage
    from tests.scheduling.fake_worker import Block, FakeWorker
    from tests.simulation.scenario import ClientPlan, Scenario
    from tests.simulation.world import World

__all__ = ["SimulatedRank"]


class SimulatedRank:
    """A process of the group."""

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
        self._lethal = {client.number: client for client in scenario.clients if client.is_lethal}
        self._started_s = world.now_s()
        one, other = connect_sockets(world, draws, delay_s=scenario.channel_delay_s)
        self.controller_end = ControllerEnd(world, one)
        other.on_arrival = self._serve
        self._channel: StepChannel[WorkerMessage, ControllerMessage] = StepChannel(
            other,  # type: ignore[arg-type]  # it has what channels use
            StepPlan | StepMasks,
        )
        self.held_rows: deque[set[int]] = deque()
        """Of plans that rank 0 has not run."""
        self.is_hung = False
        self.is_killed = False
        """Whether a request has killed it."""
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
            self._channel.close()

    def fail(self) -> None:
        """End as a rank does that has no memory left."""
        if not self._is_dead and not self.is_hung:
            self._channel.post(WorkerFailure("OutOfMemoryError"))
            self._is_dead = True

    def _serve(self) -> None:
        """Take what has arrived at the rank, and begin a step."""
        if self._is_dead or self.is_hung:
            return
        for message in self._channel.received():
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
            client = self._lethal.get(self._seeds[one.row])
            if client is not None and self._dies_of(client, plan, one):
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

    def _dies_of(self, client: ClientPlan, plan: StepPlan, sequence: SequencePlan) -> bool:
        """Return whether a step with a sequence of a lethal request kills the rank."""
        alive_s = self._world.now_s() - self._started_s
        return (
            sequence.first_position + sequence.num_tokens == client.lethal_length
            or (client.lethal_step is not None and plan.step + 1 >= client.lethal_step)
            or (client.lethal_s is not None and alive_s >= client.lethal_s)
        )

    def _end_copies(self, step: int) -> None:
        """Acknowledge steps up to `step`; copies run in order."""
        if self._is_dead or self.is_hung:
            return
        while self._copying and self._copying[0] <= step:
            self._send(StepAck(self._copying.popleft()))

    def _send(self, message: StepOutput | StepAck | DiskReport) -> None:
        self._channel.post(message)
        while not self._channel.flush():
            pass
