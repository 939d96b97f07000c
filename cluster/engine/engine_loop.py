"""The loop of an engine: schedule, send the plan, collect the output, publish events.

One thread runs steps; any thread may submit, abort and finish. Plan k + 1 is made and sent
while step k runs. The scheduler is only accessed under the lock, which is never held while
a rank computes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from cluster.engine.crash_search import CrashHandler, DeathBudget
from cluster.engine.embedding_scheduler import EmbeddingScheduler
from cluster.engine.output_watch import OutputWatch, client_events
from cluster.engine.stats import DurationHistogram, EngineStats
from cluster.engine.watchdog import EngineClock, ProgressClock, Watchdog, position_of
from cluster.scheduling.fault_recovery import BlamedError
from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.scheduler import Scheduler
from cluster.scheduling.speculation import Speculator
from pagedray.errors import EngineError, HungRankError, ShuttingDownError, StartupError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from cluster.engine.embedding_scheduler import EmbeddingRequest
    from cluster.engine.executor import Executor, Outage
    from cluster.scheduling.event import TokenEvent
    from pagedray.batch import DiskReport, StepOutput, StepPlan
    from pagedray.config import EngineConfig
    from pagedray.rank_roofline import RankRoofline
    from pagedray.request import Request

__all__ = ["EngineLoop", "EventSink", "MaskPatience"]

logger = logging.getLogger(__name__)

_ACK_POLL_S = 0.001
_DEADLINE_POLL_S = 0.05
_STALL_S = 8.0
"""Time with work and idle ranks, but without a step, after which the engine is not healthy."""
_FATAL_STALL_S = 60.0
"""Time after which an engine that is stalled, and cannot recover, ends."""
_LOCK_TIMEOUT_S = 1.0
# Steps of a small model on a GPU take milliseconds, prompts of a large model on a CPU minutes.
_STEP_BOUNDS_S: tuple[float, ...] = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0),
)
_EMBEDDING_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0),
)

_MIN_S = 0.003
_MAX_S = 0.02
_SHARE = 0.75
"""Share of the duration of a step; less than 1, so that waiting does not extend the wait."""


class EventSink(Protocol):
    """Receives tokens, on the loop's thread; must not block."""

    def publish(self, events: Sequence[TokenEvent]) -> None:
        """Receive the events of one step."""

    def fail_all(self, error: EngineError) -> None:
        """End every open request with `error`."""


class EngineLoop:
    """One replica: a scheduler over an executor, and the thread that runs its steps."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        sink: EventSink,
        *,
        death_budget: DeathBudget | None = None,
        clock: EngineClock | None = None,
    ) -> None:
        """`sink` receives no events of a model that makes embeddings."""
        self._executor = executor
        self._clock = clock or EngineClock()
        self._lock = self._clock.make_condition()
        self._scheduler = _make_scheduler(config, executor)
        step_bounds_s = _STEP_BOUNDS_S
        if isinstance(self._scheduler, EmbeddingScheduler):
            sink, step_bounds_s = self._scheduler, _EMBEDDING_BOUNDS_S
        self._outlet = _Outlet(sink)
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
        self._error: EngineError | None = None
        self._is_stopping = False
        self._is_replacing = False
        self._death_budget = death_budget or DeathBudget()
        self._replacements = {"death": 0, "hang": 0}
        """Times that ranks were replaced, by cause."""
        self._num_hangs = {"rank": 0, "steps": 0}
        """Hangs that were found, by the party without progress."""
        self._num_unpinned = 0
        """Blocks of CPU pools that cannot be pinned."""
        self._num_uncaptured = 0
        """Sizes of steps without CUDA graphs after failed captures."""
        self._stall = ""
        """The part without progress; empty if everything makes progress."""
        self._step_clock, self._stall_clock = ProgressClock(), ProgressClock()
        self._watchdog = Watchdog(self._check_progress)
        self._num_steps = 0
        self._last_step_s = 0.0
        self._step_times = DurationHistogram(step_bounds_s)
        self._thread = threading.Thread(target=self._loop, name="pagedray-steps", daemon=True)

    def start_steps(self) -> None:
        """Start the step thread and the watchdog. Called once."""
        self._thread.start()
        self._watchdog.start()

    def stop_steps(self, reason: EngineError | None = None, *, timeout_s: float = 5.0) -> None:
        """End every request, reject new requests, and end the thread.

        Requests end with `reason`, or a ShuttingDownError.
        """
        self._watchdog.stop()
        self._is_stopping = True
        # A step thread that hangs may hold the lock.
        if self._lock.acquire(timeout=timeout_s):
            self._lock.notify()
            self._lock.release()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._fail(reason or ShuttingDownError())

    def close(self, reason: EngineError | None = None) -> None:
        """Stop as `stop_steps` does, then end the ranks. May be called twice."""
        self.stop_steps(reason)
        self._executor.close()

    @property
    def is_healthy(self) -> bool:
        """Whether steps run and their outputs are finite.

        False while ranks hang or are replaced, and once none can be.
        """
        outage = self._executor.outage
        return (
            self._error is None
            and (outage is None or outage.is_ready)
            and not self._is_stopping
            and not self._is_replacing
            and not self._stall
            and self._thread.is_alive()
            and not self._output_watch.is_broken
        )

    @property
    def error(self) -> EngineError | None:
        """The error that ended the engine, or None."""
        return self._error

    @property
    def outage(self) -> Outage | None:
        """The reason why ranks cannot be replaced, or None."""
        return self._executor.outage

    def submit_request(self, request: Request) -> None:
        """Accept a request. Raises RequestError or EngineError."""
        # Not under the lock, which every step needs.
        prompt = self._scheduler.prepare_prompt(request)
        with self._lock:
            if self._error is not None:
                # Otherwise the error would keep the frames of each call that raises it, with
                # their requests.
                raise self._error.with_traceback(None)
            if self._is_stopping:
                raise ShuttingDownError
            self._crashes.check(request)
            self._scheduler.add_request(request, prompt)
            self._num_prompt_tokens += len(request.prompt_token_ids)
            self._lock.notify()

    def submit_texts(self, texts: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        """Accept texts to embed; the result is `[num_texts, size]`. Cancelling it aborts them.

        Raises OverloadedError, LethalRequestError or EngineError.
        """
        assert isinstance(self._scheduler, EmbeddingScheduler)
        job = self._scheduler.open_job(texts)
        try:
            self.submit_request(job.request)
        except BaseException:
            self._scheduler.forget_job(job)
            raise
        return job.answer

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
        """Return a snapshot of the counters and gauges."""
        with self._lock:
            scheduler = self._scheduler.stats()
            return EngineStats(
                scheduler=scheduler,
                num_steps=self._num_steps,
                last_step_s=self._last_step_s,
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_generated_tokens
                - scheduler.speculation.num_refused_tokens
                - scheduler.speculation.num_dropped,
                block_bytes=self._executor.cache_size.block_bytes,
                num_groups=len(self._executor.cache_size.groups),
                state_blocks=self._executor.cache_size.state_blocks,
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
        """Whether steps are expected; read without `_lock`."""
        return self._scheduler.has_work and not self._waits_for_masks

    def _loop(self) -> None:
        try:
            while not self._is_stopping:
                self._iterate()
        except Exception as error:
            # While the engine stops, its ranks may end during a step or a replacement.
            if not self._is_stopping:
                self._break_down(error)

    def _iterate(self) -> None:
        if self._output_watch.is_suspicious:
            self._test_outputs()
        try:
            self._step()
        except WorkerError as error:
            self._replace_ranks(error)

    def _step(self) -> None:
        """Send the next plan and collect the oldest output, or wait briefly for work."""
        scheduler = self._scheduler
        plan, ended = self._next_plan()
        self._outlet.publish(ended)
        was_idle = not self._in_flight
        if plan is not None:
            self._executor.submit_plan(plan)
            self._in_flight.append(self._clock.now_s())
        if was_idle and scheduler.has_structures:
            self._make_masks()
        if self._in_flight and (
            plan is None or len(self._in_flight) >= scheduler.max_plans_in_flight
        ):
            output = self._executor.collect_output()
            # A step begins when its plan was sent and the step before has ended.
            began_s = max(self._in_flight.popleft(), self._step_ended_s)
            self._step_ended_s = self._clock.now_s()
            step_s = self._step_ended_s - began_s
            self._apply_output(output, step_s)
            if scheduler.has_structures:
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
        if not (made.ends or made.late or made.deferred or made.cut):
            return
        with self._lock:
            events = self._scheduler.apply_masks(made)
        self._outlet.publish(events)

    def _next_plan(self) -> tuple[StepPlan | None, list[TokenEvent]]:
        # Ranks are read outside the lock, which must not be held for long.
        acknowledged_step, reports = self._executor.poll_ranks()
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
            self._num_steps += 1
            self._last_step_s = step_s
            self._step_times.record(step_s)
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

    def _replace_ranks(self, error: WorkerError) -> None:
        """Start new ranks after a death or a hang; requests continue with their tokens.

        Raises WorkerError once the budget of deaths is spent, StartupError and ShuttingDownError.
        """
        self._is_replacing = True
        started_s = self._clock.now_s()
        with self._lock:
            has_narrowed = self._crashes.note_death()
            num_open = self._scheduler.num_open
        are_waiting = "1 request is" if num_open == 1 else f"{num_open} requests are"
        what = f"Replacing ranks; {are_waiting} waiting."
        self._pause_after(error, what, has_narrowed=has_narrowed)
        keeps_cpu_pool = self._restart_ranks()
        with self._lock:
            self._begin_epoch(keeps_cpu_pool=keeps_cpu_pool)
            self._replacements["hang" if isinstance(error, HungRankError) else "death"] += 1
        self._is_replacing = False
        logger.info("All ranks are ready again after %.1f s.", self._clock.now_s() - started_s)

    def _restart_ranks(self) -> bool:
        """Start new ranks, and replace ranks that die meanwhile."""
        while True:
            try:
                return self._executor.restart_ranks()
            except WorkerError as error:
                self._pause_after(error, "Starting the ranks again.")

    def _pause_after(self, error: WorkerError, what: str, *, has_narrowed: bool = False) -> None:
        """Log a death of ranks, and pause as long as the budget of deaths says.

        `has_narrowed` is true if the death narrowed the search for its cause. Raises WorkerError if
        the budget is spent, and ShuttingDownError.
        """
        if error.details:
            logger.warning("%s", error.details)
        pause_s = self._death_budget.note_death(
            self._clock.now_s(), error, num_steps=self._num_steps, has_narrowed=has_narrowed
        )
        logger.warning("%s %s", error, what)
        with self._lock:
            if self._lock.wait_for(lambda: self._is_stopping, pause_s):
                raise ShuttingDownError

    def _begin_epoch(self, *, keeps_cpu_pool: bool) -> None:
        """Begin again at step 0, with new ranks."""
        self._in_flight.clear()
        self._scheduler.reset(keeps_cpu_pool=keeps_cpu_pool)

    def _check_progress(self, now_s: float) -> None:
        """Find out whether something hangs; called by the watchdog."""
        if self._is_replacing or self._error is not None:
            self._stall = ""
            return
        health = self._executor.observe_ranks(now_s)
        self._num_unpinned = health.num_unpinned
        self._num_uncaptured = health.num_uncaptured
        silence_s = self._step_clock.silence_s(
            now_s, self._num_steps, is_expected=health.is_busy or not self._has_work
        )
        stall = health.hang
        if not stall and silence_s > _STALL_S:
            stall = f"The engine has work but has run no step for {silence_s:.1f} s."
        if stall and not self._stall:
            self._num_hangs["rank" if health.hang else "steps"] += 1
            if not health.hang:
                logger.error("%s The step thread is at %s.", stall, position_of(self._thread))
            elif not health.is_replaceable:
                logger.error("%s It cannot be replaced, since it runs in this process.", stall)
        elif self._stall and not stall:
            logger.warning("The engine makes progress again.")
        self._stall = stall
        # Ranks that can be replaced are replaced by the step thread.
        stalled_s = self._stall_clock.silence_s(now_s, bool(stall), is_expected=not stall)
        if stalled_s > _FATAL_STALL_S:
            self._break_down(WorkerError(stall))

    def _break_down(self, error: Exception) -> None:
        """End the engine because of an error, which is logged."""
        if isinstance(error, StartupError | WorkerError):
            logger.error("The engine is stopping: %s", error)
            end = EngineError(f"The engine has stopped: {error}")
            if isinstance(error, WorkerError):
                end.retry_after_s = error.retry_after_s
            self._fail(end)
            return
        logger.error("The engine is stopping after an internal error.", exc_info=error)
        self._fail(EngineError("The engine failed; see the server log."))

    def _fail(self, error: EngineError) -> None:
        """End every request with an error, and reject others; only the first call counts."""
        # A thread that hangs may hold the lock.
        has_lock = self._lock.acquire(timeout=_LOCK_TIMEOUT_S)
        is_first = self._error is None
        self._error = self._error or error
        if has_lock:
            self._lock.release()
        if is_first:
            self._outlet.fail_all(error)


def _make_scheduler(config: EngineConfig, executor: Executor) -> Scheduler:
    if config.model.pools:
        return EmbeddingScheduler(config)
    cache, size = config.cache, executor.cache_size
    return Scheduler(
        config=config.scheduler,
        kv=KvOptions(
            block_size=cache.block_size,
            num_blocks=size.num_blocks,
            num_cpu_blocks=size.num_cpu_blocks,
            enable_prefix_cache=cache.enable_prefix_cache,
            enable_cpu_prefix_cache=cache.enable_cpu_prefix_cache,
            num_disk_blocks=cache.num_disk_blocks(size.block_bytes),
            windows=size.groups,
            state_blocks=size.state_blocks,
            state_grid=size.state_grid,
        ),
        max_model_len=config.max_model_len,
        speculator=None if config.speculation is None else Speculator(config.speculation),
    )


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
