"""A thread that runs steps until it is stopped or they fail."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from cluster.engine.death_budget import DeathBudget
from cluster.engine.duration_histogram import DurationHistogram
from pagedray.errors import EngineError, ShuttingDownError, StartupError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.engine.executor import Executor, Outage

__all__ = ["StepLoop"]

logger = logging.getLogger(__name__)


class StepLoop(ABC):
    """The thread, state and errors of an engine.

    A subclass accesses what threads share under `_wake`, and notifies `_wake` of work.
    """

    def __init__(
        self, executor: Executor, step_bounds_s: Sequence[float], death_budget: DeathBudget | None
    ) -> None:
        """`step_bounds_s` are the bounds of the histogram of step durations."""
        self._executor = executor
        self._wake = threading.Condition()
        self._error: EngineError | None = None
        self._is_stopping = False
        self._is_replacing = False
        self._death_budget = death_budget or DeathBudget()
        self._num_replacements = 0
        self._num_steps = 0
        self._last_step_s = 0.0
        self._step_times = DurationHistogram(step_bounds_s)
        self._thread = threading.Thread(target=self._loop, name="pagedray-steps", daemon=True)

    def start_steps(self) -> None:
        self._thread.start()

    def stop_steps(self, *, timeout_s: float = 5.0) -> None:
        """End every request, reject new ones, and end the thread."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._fail(ShuttingDownError())

    def close(self) -> None:
        """Stop, then end the ranks. May be called twice."""
        self.stop_steps()
        self._executor.close()

    @property
    def is_healthy(self) -> bool:
        """Whether steps run, and dead ranks could be replaced; False while they are."""
        return (
            self._error is None
            and self._executor.outage is None
            and not self._is_stopping
            and not self._is_replacing
            and self._thread.is_alive()
        )

    @property
    def error(self) -> EngineError | None:
        """The error that ended the engine, or None."""
        return self._error

    @property
    def outage(self) -> Outage | None:
        """What prevents the replacement of ranks, if anything does."""
        return self._executor.outage

    @abstractmethod
    def _turn(self) -> None:
        """Run one iteration, or wait briefly for work.

        Any exception ends the engine.
        """

    @abstractmethod
    def _end_requests(self, error: EngineError) -> None:
        """End every request; called once, without `_wake`, after new ones are rejected."""

    def _check_open(self) -> None:
        """Raise EngineError if the engine has ended or is stopping."""
        if self._error is not None:
            raise self._error
        if self._is_stopping:
            raise ShuttingDownError

    def _count_step(self, step_s: float) -> None:
        self._num_steps += 1
        self._death_budget.note_step()
        self._last_step_s = step_s
        self._step_times.record(step_s)

    def _pause_after(self, error: WorkerError, what: str, has_narrowed: bool = False) -> None:
        """Log a death of ranks and what follows, and pause as long as the budget of deaths says.

        `has_narrowed` says that fewer requests may have caused it. Raises WorkerError if the budget
        is spent, and ShuttingDownError.
        """
        if error.details:
            logger.warning("%s", error.details)
        pause_s = self._death_budget.note_death(time.monotonic(), error, has_narrowed=has_narrowed)
        logger.warning("%s %s", error, what)
        with self._wake:
            if self._wake.wait_for(lambda: self._is_stopping, pause_s):
                raise ShuttingDownError

    def _loop(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except Exception as error:
            # While the engine stops, its ranks may end during a step or a replacement.
            if not self._is_stopping:
                self._break_down(error)

    def _break_down(self, error: Exception) -> None:
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
        with self._wake:
            if self._error is not None:
                return
            self._error = error
        self._end_requests(error)
