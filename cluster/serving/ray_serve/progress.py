"""Detects an engine that is stalled, from its statistics. Plain Python with no clock."""

from __future__ import annotations

__all__ = ["ProgressWatch"]


class ProgressWatch:
    """Remembers when an engine last ran a step and when it was last healthy."""

    def __init__(self, *, stall_timeout_s: float, replace_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._replace_timeout_s = replace_timeout_s
        self._num_steps = -1
        self._moved_s: float | None = None
        self._sound_s: float | None = None

    def problem(
        self, *, num_steps: int, has_work: bool, is_healthy: bool, now_s: float
    ) -> str | None:
        """Return an error message, or None if the engine makes progress.

        An engine without work, or one that replaces its ranks, runs no steps.
        """
        if is_healthy or self._sound_s is None:
            self._sound_s = now_s
        if num_steps != self._num_steps or not (has_work and is_healthy) or self._moved_s is None:
            self._num_steps, self._moved_s = num_steps, now_s
        if now_s - self._sound_s > self._replace_timeout_s:
            return f"The ranks could not be replaced within {self._replace_timeout_s:g} s."
        if now_s - self._moved_s > self._stall_timeout_s:
            return f"The engine has work but ran no step for {self._stall_timeout_s:g} s."
        return None
