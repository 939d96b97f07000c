"""The replica's loop: schedule, send the plan, collect the output, publish tokens.

One thread runs steps; any thread may submit, abort and finish. Plan k + 1 is made and sent
while step k runs. The scheduler is only accessed under the lock, which is never held while
a rank computes.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from cluster.engine.crash_search import CrashHandler
from cluster.engine.output_watch import OutputWatch, client_events
from cluster.engine.stats import EngineStats
from cluster.engine.step_loop import StepLoop
from cluster.scheduling.fault_recovery import BlamedError
from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler
from pagedray.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.engine.crash_search import DeathBudget
    from cluster.engine.executor import Executor
    from cluster.engine.watchdog import EngineClock
    from cluster.scheduling.event import TokenEvent
    from pagedray.batch import DiskReport, StepOutput, StepPlan
    from pagedray.config import EngineConfig
    from pagedray.errors import EngineError
    from pagedray.rank_roofline import RankRoofline
    from pagedray.request import Request

__all__ = ["Controller", "EventSink", "MaskPatience"]

_ACK_POLL_S = 0.001
_DEADLINE_POLL_S = 0.05
# Steps of a small model on a GPU take milliseconds, prompts of a large model on a CPU minutes.
_STEP_BOUNDS_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0),
)

_MIN_S = 0.003
_MAX_S = 0.02
_SHARE = 0.75
"""Share of the duration of a step; less than 1, so that waiting does not extend the wait."""


class EventSink(Protocol):
    """Receives tokens, on the controller's thread; must not block."""

    def publish(self, events: Sequence[TokenEvent]) -> None:
        """Receive the events of one step."""

    def fail_all(self, error: EngineError) -> None:
        """End every open request with `error`."""


class Controller(StepLoop):
    """One replica: a scheduler over an executor."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        sink: EventSink,
        *,
        death_budget: DeathBudget | None = None,
        clock: EngineClock | None = None,
    ) -> None:
        super().__init__(executor, _STEP_BOUNDS_S, death_budget, clock)
        self._outlet = _Outlet(sink)
        self._scheduler = Scheduler(
            config=config.scheduler,
            kv=KvOptions(
                block_size=config.cache.block_size,
                num_blocks=executor.cache_size.num_blocks,
                num_cpu_blocks=executor.cache_size.num_cpu_blocks,
                enable_prefix_cache=config.cache.enable_prefix_cache,
                enable_cpu_prefix_cache=config.cache.enable_cpu_prefix_cache,
                num_disk_blocks=config.cache.num_disk_blocks(executor.cache_size.block_bytes),
            ),
            max_model_len=config.max_model_len,
        )
        self._has_disk = self._scheduler.has_disk
        self._crashes = CrashHandler(self._scheduler, self._clock)
        self._output_watch = OutputWatch()
        self._mask_patience = MaskPatience()
        self._waits_for_masks = False
        """Whether nothing can be done until masks are made."""
        self._in_flight: deque[float] = deque()
        """Send times of the plans without an output yet."""
        self._step_ended_s = 0.0
        self._num_generated_tokens = 0
        self._num_prompt_tokens = 0

    @property
    def is_healthy(self) -> bool:
        """Whether steps run and their outputs are finite; False while ranks are being replaced."""
        return super().is_healthy and not self._output_watch.is_broken

    def submit_request(self, request: Request) -> None:
        """Accept a request. Raises RequestError or EngineError."""
        # Not under the lock, which every step needs.
        prompt = self._scheduler.prepare_prompt(request)
        with self._lock:
            self._check_open()
            self._crashes.check(request)
            self._scheduler.add_request(request, prompt)
            self._num_prompt_tokens += len(request.prompt_token_ids)
            self._lock.notify()

    def check_room(self, tenant: str, num_tokens: int) -> None:
        """Raise OverloadedError if the queue has no room for this many more prompt tokens."""
        self._scheduler.check_room(tenant, num_tokens)

    def abort_request(self, request_id: str) -> None:
        """End a request; has no effect if it has ended or does not exist."""
        with self._lock:
            events = self._scheduler.abort_request(request_id)
            self._lock.notify()
        self._outlet.publish(events)

    def finish_sequence(self, request_id: str, index: int) -> None:
        """End a sequence after the caller has found its stop string; no event follows."""
        with self._lock:
            self._scheduler.finish_sequence(request_id, index)
            self._lock.notify()

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                scheduler=self._scheduler.stats(),
                num_steps=self._num_steps,
                last_step_s=self._last_step_s,
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_generated_tokens,
                block_bytes=self._executor.cache_size.block_bytes,
                kernels=self._executor.kernels,
                replacements=dict(self._replacements),
                num_hangs=dict(self._num_hangs),
                num_lethal_requests=self._crashes.num_crashing,
                num_unpinned_blocks=self._num_unpinned,
                num_uncaptured_graphs=self._num_uncaptured,
                step_times=self._step_times.snapshot(),
            )

    def measure_rooflines(self) -> list[RankRoofline]:
        """Return the work of steps on each rank, and the speed of its device.

        No request may be open. Raises WorkerError, and DeviceError if too little memory is free.
        """
        return self._executor.measure_rooflines()

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_work and not self._waits_for_masks

    @property
    def _num_open(self) -> int:
        return self._scheduler.num_open

    def _iterate(self) -> None:
        if self._output_watch.is_suspicious:
            self._test_outputs()
        try:
            self._step()
        except WorkerError as error:
            self._replace_ranks(error)

    def _note_death(self) -> bool:
        return self._crashes.note_death()

    def _begin_epoch(self, damaged: Sequence[int] | None) -> None:
        self._in_flight.clear()
        self._scheduler.reset(damaged)

    def _step(self) -> None:
        plan, ended = self._next_plan()
        self._outlet.publish(ended)
        was_idle = not self._in_flight
        if plan is not None:
            self._executor.submit_plan(plan)
            self._in_flight.append(self._clock.now_s())
        if was_idle and self._scheduler.has_structures:
            self._make_masks()
        if self._in_flight and (plan is None or len(self._in_flight) >= MAX_PLANS_IN_FLIGHT):
            output = self._executor.collect_output()
            # A step begins when its plan was sent and the step before has ended.
            began_s = max(self._in_flight.popleft(), self._step_ended_s)
            self._step_ended_s = self._clock.now_s()
            step_s = self._step_ended_s - began_s
            self._apply_output(output, step_s)
            if self._scheduler.has_structures:
                self._mask_patience.note_step(step_s)
                self._make_masks()

    def _make_masks(self) -> None:
        """Send the masks of the plan in flight, if it samples under masks; ask for deferred masks.

        They are computed while the ranks run its forward pass, and without the lock, since a
        grammar may be slow. A sequence with a late mask samples in a later step. At most one plan
        is in flight, and its masks are not sent yet.
        """
        # No lock: only this thread changes which plans are in flight.
        masked = self._scheduler.masked_step()
        self._waits_for_masks = masked is not None and not self._in_flight
        if masked is None:
            return
        # Without its first mask, a sequence computes the last token of its prompt again.
        is_alone = masked.is_first and self._scheduler.num_open == 1
        made = masked.make_masks(self._mask_patience.wait_s(delays_others=not is_alone))
        if made.masks is not None:
            self._executor.send_masks(made.masks)
        self._mask_patience.note_masks(may_delay_step=is_alone or bool(made.late))
        if not (made.ends or made.late or made.deferred):
            return
        with self._lock:
            events = self._scheduler.apply_masks(made)
        self._outlet.publish(events)

    def _next_plan(self) -> tuple[StepPlan | None, list[TokenEvent]]:
        # Ranks are read outside the lock, which must not be held for long.
        acknowledged_step = self._executor.acknowledged_step
        reports = self._executor.take_disk_reports() if self._has_disk else ()
        with self._lock:
            now_s = self._clock.now_s()
            ended = self._scheduler.expire_requests(now_s)
            if self._crashes.is_active:
                ended += self._crashes.examine()
            ended += self._scheduler.repair()
            plan = self._schedule(acknowledged_step, reports, now_s)
            if plan is None and not ended and not self._in_flight:
                # Idle, or every sequence is waiting for a block copy.
                has_work = self._scheduler.has_work
                self._lock.wait(_ACK_POLL_S if has_work else _DEADLINE_POLL_S)
            return plan, ended

    def _schedule(
        self, acknowledged_step: int, reports: Sequence[DiskReport], now_s: float
    ) -> StepPlan | None:
        try:
            for report in reports:
                self._scheduler.note_disk_report(report)
            self._scheduler.acknowledge(acknowledged_step)
            return self._scheduler.schedule(now_s)
        except BlamedError as fault:
            # A defect that concerns one request ends only that request.
            self._scheduler.note_fault(fault)
            return None

    def _apply_output(self, output: StepOutput, step_s: float) -> None:
        with self._lock:
            is_watched = self._crashes.is_active or self._output_watch.is_suspicious
            num_bad = self._scheduler.num_nonfinite_sequences
            events = self._scheduler.update(output)
            self._count_step(step_s)
            self._num_generated_tokens += len(output.token_ids)
            if is_watched or self._scheduler.num_nonfinite_sequences != num_bad:
                self._output_watch.note_events(events, self._clock.now_s())
                events = client_events(events)
        self._outlet.publish(events)

    def _test_outputs(self) -> None:
        """Submit a test request if it is due.

        Raises WorkerError, which ends the engine, if tests have failed for too long.
        """
        with self._lock:
            request = self._output_watch.next_test(self._clock.now_s())
            if request is not None:
                self._scheduler.add_request(request)

    def _end_requests(self, error: EngineError) -> None:
        self._outlet.fail_all(error)


class _Outlet:
    """Publishes no events after `fail_all`: a late step or abort concerns ended requests."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._has_failed = False

    def publish(self, events: Sequence[TokenEvent]) -> None:
        if not events:
            return
        with self._lock:
            if not self._has_failed:
                self._sink.publish(events)

    def fail_all(self, error: EngineError) -> None:
        with self._lock:
            self._has_failed = True
            self._sink.fail_all(error)


class MaskPatience:
    """Derives the wait from the duration of earlier steps, since masks are made during a step."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._may_delay_step = False

    def wait_s(self, *, delays_others: bool) -> float:
        """Return the seconds to wait for the masks of the next step.

        `delays_others` is true if a wait may delay sequences without late masks.
        """
        if not delays_others:
            return _MAX_S
        return min(max(_MIN_S, _SHARE * self._step_s), _MAX_S)

    def note_masks(self, *, may_delay_step: bool) -> None:
        """Note whether masks of the step in flight were late, or awaited for longer than usual."""
        self._may_delay_step = may_delay_step

    def note_step(self, step_s: float) -> None:
        """Note the duration of a step."""
        if not self._may_delay_step:
            self._step_s = step_s
