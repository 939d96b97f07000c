"""Durations counted by how long they were: a histogram that costs a fraction of a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DurationCounter", "DurationCounts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationCounts:
    """How many durations were how long."""

    bounds_s: tuple[float, ...] = ()
    """The longest duration of each bin but the last, which has no bound."""
    counts: tuple[int, ...] = (0,)
    """Durations of each bin, those of shorter bins left out."""
    total_s: float = 0.0


class DurationCounter:
    """Counts durations. One thread at a time calls."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._total_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self._total_s += duration_s

    def counts(self) -> DurationCounts:
        """Return what was counted so far."""
        return DurationCounts(
            bounds_s=self._bounds_s, counts=tuple(self._counts), total_s=self._total_s
        )
