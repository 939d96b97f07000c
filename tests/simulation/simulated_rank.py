"""One rank in virtual time, behind the framing of the step channel.

Rank 0 is the worker of `tests/scheduling/fake_worker.py`, which checks what it reads; the others
acknowledge steps. Copies between the pools end up to a few steps after the step that has them, and
the rank reports its reads and writes of files a while later. Its sockets deliver bytes late and in
pieces.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from pagedray.batch import DiskReport, StepAck, StepMasks, StepOutput, StepPlan, WorkerFailure
from pagedray.channel import StepChannel
from pagedray.errors import WorkerError

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

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
        assert not (masked and plan.is_overlapped), "a mask depends on tokens that are not known"
        if masked and plan.step not in self._masks:
            return
        self._plans.popleft()
        num_sampled: dict[int, int] = {}
        if masked:
            masks = self._masks.pop(plan.step)
            words = iter(masks.words)
            assert len(masks.words) == len(masked)
            num_before: dict[int, int] = {}
            for one in plan.sequences:
                if not one.is_sampled:
                    continue
                is_masked = self._is_masked(one.row, one.first_position + one.num_tokens)
                if is_masked and not next(words):
                    num_sampled.setdefault(one.row, num_before.get(one.row, 0))
                num_before[one.row] = num_before.get(one.row, 0) + 1
            for index in masks.released:
                self._mask_positions[masked[index]] = None
        self._is_busy = True
        delay_s = self._step_s * (0.5 + self._draws.random())
        self._world.call_later(delay_s, lambda: self._end_step(plan, num_sampled))

    def _is_masked(self, row: int, position: int) -> bool:
        first = self._mask_positions[row]
        return first is not None and position >= first

    def _end_step(self, plan: StepPlan, num_sampled: dict[int, int]) -> None:
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
            worker.num_sampled[plan.step] = num_sampled
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


_HANG_S = 1.0
"""Time after which a rank that does not answer counts as hung."""


class ControllerEnd:
    """Sends messages to a rank, and keeps what it has answered."""

    def __init__(self, world: World, socket: VirtualSocket) -> None:
        self._world = world
        self._channel: StepChannel[ControllerMessage, WorkerMessage] = StepChannel(
            socket,  # type: ignore[arg-type]  # it has what channels use
            StepOutput | StepAck | DiskReport | WorkerFailure,
        )
        socket.on_arrival = self._note_news
        self.has_news = False
        """Whether something has arrived since this was last set to False."""
        self.outputs: deque[StepOutput] = deque()
        self.disk_reports: deque[DiskReport] = deque()
        self.acknowledged_step = -1
        self.hang_s = math.inf
        """When the rank counts as hung unless it answers."""
        self._posted_step = -1
        self._num_disk_jobs = 0
        """Reads and writes of plans that the rank has not reported."""

    def post(self, message: StepPlan | StepMasks) -> None:
        """Send a message to the rank. Raises WorkerError if it is gone."""
        if math.isinf(self.hang_s):
            self.hang_s = self._world.now_s() + _HANG_S
        self._posted_step = message.step
        if isinstance(message, StepPlan):
            self._num_disk_jobs += bool(message.disk_reads) + bool(message.disk_writes)
        self._channel.post(message)
        while not self._channel.flush():
            pass

    def receive(self) -> None:
        """Take what has arrived. Raises WorkerError if the rank is gone or has failed."""
        for message in self._channel.received():
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

    def _note_news(self) -> None:
        self.has_news = True


_MOST_ACCEPTED = 100
"""Bytes that a socket takes at once."""


class VirtualSocket:
    """One end. What was sent is cut anywhere; its pieces arrive in order."""

    family = socket.AF_UNIX

    def __init__(self, world: World, draws: random.Random, *, delay_s: float) -> None:
        self._world = world
        self._draws = draws
        self._delay_s = delay_s
        self._peer: VirtualSocket | None = None
        self._arrived = bytearray()
        self._last_arrival_s = 0.0
        self._is_ended = False
        """Whether the peer is gone, after what has arrived."""
        self._is_closed = False
        self.on_arrival: Callable[[], None] | None = None

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def fileno(self) -> int:
        return 0

    def send(self, data: bytes | memoryview) -> int:
        """Take some of the bytes. Raises OSError if the peer is gone."""
        peer = self._peer
        assert peer is not None
        if self._is_closed or self._is_ended or peer._is_closed:
            raise BrokenPipeError("The peer is gone.")
        taken = bytes(data[:_MOST_ACCEPTED])
        first = 0
        while first < len(taken):
            size = len(taken)
            if self._draws.random() < 0.3:
                size = self._draws.randint(1, len(taken))
            piece = taken[first : first + size]
            first += size
            self._deliver(lambda piece=piece: peer._arrive(piece))  # type: ignore[misc]
        return len(taken)

    def recv(self, size: int) -> bytes:
        """Return what has arrived; nothing if the peer is gone. Raises BlockingIOError."""
        if self._is_closed:
            raise OSError("The socket is closed.")
        if not self._arrived:
            if self._is_ended:
                return b""
            raise BlockingIOError
        chunk = bytes(self._arrived[:size])
        del self._arrived[:size]
        return chunk

    def close(self) -> None:
        """Close this end; the other reads end-of-file after some of what was sent."""
        peer = self._peer
        assert peer is not None
        self._is_closed = True
        self._world.call_later(self._draws.random() * self._delay_s, peer._end)

    def _deliver(self, arrive: Callable[[], None]) -> None:
        delay_s = self._draws.random() * self._delay_s
        self._last_arrival_s = max(self._last_arrival_s, self._world.now_s() + delay_s)
        self._world.call_at(self._last_arrival_s, arrive)

    def _arrive(self, piece: bytes) -> None:
        # What arrives after the end was cut off.
        if self._is_ended or self._is_closed:
            return
        self._arrived += piece
        if self.on_arrival is not None:
            self.on_arrival()

    def _end(self) -> None:
        self._is_ended = True
        if self.on_arrival is not None and not self._is_closed:
            self.on_arrival()


def connect_sockets(
    world: World, draws: random.Random, *, delay_s: float
) -> tuple[VirtualSocket, VirtualSocket]:
    """Return two ends; bytes take at most `delay_s`, unless earlier ones arrive later."""
    one, other = (VirtualSocket(world, draws, delay_s=delay_s) for _ in range(2))
    one._peer, other._peer = other, one
    return one, other
