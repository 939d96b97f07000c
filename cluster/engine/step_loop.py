"""A thread that runs steps until it is stopped or they fail."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.engine.crash_search import DeathBudget
from cluster.engine.stats import DurationHistogram
from cluster.engine.watchdog import EngineClock, ProgressClock, Watchdog, position_of
from pagedray.errors import (
    EngineError,
    HungRankError,
    ShuttingDownError,
    StartupError,
    WorkerError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.engine.executor import Executor, Outage

__all__ = ["StepLoop"]

logger = logging.getLogger(__name__)

_STALL_S = 8.0
"""Time with work and idle ranks, but without a step, after which the engine is not healthy."""
_FATAL_STALL_S = 60.0
"""Time after which an engine that is stalled, and cannot recover, ends."""
_LOCK_TIMEOUT_S = 1.0


class StepLoop(ABC):
    """The thread, state and errors of an engine.

    A subclass accesses shared state under `_lock`, and notifies `_lock` of work.
    """

    def __init__(
        self,
        executor: Executor,
        step_bounds_s: Sequence[float],
        death_budget: DeathBudget | None,
        clock: EngineClock | None = None,
    ) -> None:
        """`step_bounds_s` are the bounds of the histogram of step durations."""
        self._executor = executor
        self._clock = clock or EngineClock()
        self._lock = self._clock.make_condition()
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
        """Whether steps run; False while ranks hang or are replaced, and once none can be."""
        outage = self._executor.outage
        return (
            self._error is None
            and (outage is None or outage.is_ready)
            and not self._is_stopping
            and not self._is_replacing
            and not self._stall
            and self._thread.is_alive()
        )

    @property
    def error(self) -> EngineError | None:
        """The error that ended the engine, or None."""
        return self._error

    @property
    def outage(self) -> Outage | None:
        """The reason why ranks cannot be replaced, or None."""
        return self._executor.outage

    @abstractmethod
    def _iterate(self) -> None:
        """Run one iteration, or wait briefly for work.

        Any exception ends the engine.
        """

    @property
    @abstractmethod
    def _has_work(self) -> bool:
        """Whether a request has not ended; read without `_lock`."""

    @property
    @abstractmethod
    def _num_open(self) -> int:
        """Requests that have not ended."""

    @abstractmethod
    def _note_death(self) -> bool:
        """Note the requests that ran when ranks died; return whether that narrowed the search.

        Called with `_lock`, before new ranks start.
        """

    @abstractmethod
    def _begin_epoch(self, damaged: Sequence[int] | None) -> None:
        """Begin again at step 0, with new ranks; called with `_lock`.

        For `damaged`, see `Executor.restart_ranks`.
        """

    @abstractmethod
    def _end_requests(self, error: EngineError) -> None:
        """End every request; called once, without `_lock`, after new requests are rejected."""

    def _check_open(self) -> None:
        """Raise EngineError if the engine has ended or is stopping."""
        if self._error is not None:
            # Otherwise the error would keep the frames of each call that raises it, with their
            # requests.
            raise self._error.with_traceback(None)
        if self._is_stopping:
            raise ShuttingDownError

    def _count_step(self, step_s: float) -> None:
        self._num_steps += 1
        self._last_step_s = step_s
        self._step_times.record(step_s)

    def _replace_ranks(self, error: WorkerError) -> None:
        """Start new ranks after a death or a hang; requests continue with their tokens.

        Raises WorkerError once the budget of deaths is spent, StartupError and ShuttingDownError.
        """
        self._is_replacing = True
        started_s = self._clock.now_s()
        with self._lock:
            has_narrowed = self._note_death()
            num_open = self._num_open
        are_waiting = "1 request is" if num_open == 1 else f"{num_open} requests are"
        what = f"Replacing ranks; {are_waiting} waiting."
        self._pause_after(error, what, has_narrowed=has_narrowed)
        damaged = self._restart_ranks()
        with self._lock:
            self._begin_epoch(damaged)
            self._replacements["hang" if isinstance(error, HungRankError) else "death"] += 1
        self._is_replacing = False
        logger.info("All ranks are ready again after %.1f s.", self._clock.now_s() - started_s)

    def _restart_ranks(self) -> Sequence[int] | None:
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

    def _loop(self) -> None:
        try:
            while not self._is_stopping:
                self._iterate()
        except Exception as error:
            # While the engine stops, its ranks may end during a step or a replacement.
            if not self._is_stopping:
                self._break_down(error)

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

    def _fail(self, error: EngineError) -> None:
        """End every request with an error, and reject others; only the first call counts."""
        with self._lock_or_timeout():
            is_first = self._error is None
            self._error = self._error or error
        if is_first:
            self._end_requests(error)

    @contextmanager
    def _lock_or_timeout(self) -> Iterator[None]:
        """Hold `_lock`, or continue without it after a second: a thread that hangs may hold it."""
        has_lock = self._lock.acquire(timeout=_LOCK_TIMEOUT_S)
        try:
            yield
        finally:
            if has_lock:
                self._lock.release()
