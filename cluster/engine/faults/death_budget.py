"""How often ranks may die before their engine ends, and the pauses before they are replaced.

It has no clock: times are arguments.
"""

from __future__ import annotations

from collections import deque

from pagedray.errors import WorkerError

__all__ = ["DeathBudget"]

_RETRY_S = 10.0
"""Time after which a client may retry: a supervisor restarts the process, or routes elsewhere."""


class DeathBudget:
    """The deaths of a group's ranks, and the pauses before they are replaced."""

    def __init__(
        self,
        *,
        max_deaths: int = 60,
        window_s: float = 600.0,
        max_barren: int = 5,
        barren_s: float = 60.0,
        first_pause_s: float = 1.0,
        max_pause_s: float = 10.0,
    ) -> None:
        """The budget is spent by `max_deaths` within `window_s`.

        It is also spent by `max_barren` deaths over at least `barren_s` without any step between
        them. After three such deaths there is a pause, which doubles with each.
        """
        self._max_deaths = max_deaths
        self._window_s = window_s
        self._max_barren = max_barren
        self._barren_s = barren_s
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._deaths: deque[float] = deque()
        self._num_steps = 0
        self._num_barren = 0
        self._barren_since_s = 0.0

    def note_death(
        self, now_s: float, error: WorkerError, *, num_steps: int, has_narrowed: bool = False
    ) -> float:
        """Return the pause before the replacement, in seconds. Raises WorkerError without budget.

        `num_steps` counts the steps that have finished since the engine started. `has_narrowed`
        says that the death narrowed the search for the request that causes them.
        """
        if num_steps != self._num_steps:
            self._num_steps, self._num_barren = num_steps, 0
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - self._window_s:
            self._deaths.popleft()
        if not self._num_barren:
            self._barren_since_s = now_s
        self._num_barren += not has_narrowed
        barren_s = now_s - self._barren_since_s
        if self._num_barren >= self._max_barren and barren_s >= self._barren_s:
            raise _spent(
                f"its ranks died {self._num_barren} times in {barren_s:.0f} s without finishing a "
                f"step. {error}",
                error,
            )
        if len(self._deaths) >= self._max_deaths:
            raise _spent(
                f"its ranks died {len(self._deaths)} times in {self._window_s:g} s. {error}", error
            )
        num_pauses = self._num_barren - 3
        if has_narrowed or num_pauses < 0:
            return 0.0
        return min(self._first_pause_s * 2.0**num_pauses, self._max_pause_s)


def _spent(message: str, cause: WorkerError) -> WorkerError:
    error = WorkerError(message, details=cause.details)
    error.retry_after_s = _RETRY_S
    return error
