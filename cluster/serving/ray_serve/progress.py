"""Detects an engine that is stalled, from its statistics. Plain Python with no clock."""

from __future__ import annotations

from cluster.engine.watchdog import ProgressClock

__all__ = ["ProgressWatch"]

_MAX_TICK_S = 15.0
"""Serve checks every 5 s. A longer time is a pause of the replica or of the machine."""


class ProgressWatch:
    """Measures for how long an engine has run no step, and for how long it was not healthy."""

    def __init__(self, *, stall_timeout_s: float, replace_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._replace_timeout_s = replace_timeout_s
        self._steps = ProgressClock(max_tick_s=_MAX_TICK_S)
        self._health = ProgressClock(max_tick_s=_MAX_TICK_S)

    def problem(
        self, *, num_steps: int, has_work: bool, is_healthy: bool, now_s: float
    ) -> str | None:
        """Return an error message, or None if the engine makes progress.

        An engine without work, or that replaces its ranks, runs no steps.
        """
        may_rest = not (has_work and is_healthy)
        still_s = self._steps.silence_s(now_s, num_steps, is_expected=may_rest)
        unhealthy_s = self._health.silence_s(now_s, None, is_expected=is_healthy)
        if unhealthy_s > self._replace_timeout_s:
            return f"The ranks could not be replaced within {self._replace_timeout_s:g} s."
        if still_s > self._stall_timeout_s:
            return f"The engine has work but ran no step for {self._stall_timeout_s:g} s."
        return None
