"""Counters of an engine, and histograms of durations."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cluster.scheduling.scheduler import SchedulerStats
from pagedray.config import KernelReport

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DurationHistogram", "EngineStats", "HistogramSnapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSnapshot:
    """The counts of a histogram of durations."""

    bounds_s: tuple[float, ...] = ()
    """The upper bound of each bin but the last, which has none."""
    counts: tuple[int, ...] = (0,)
    """Durations in each bin; not cumulative."""
    total_s: float = 0.0

    @property
    def num_durations(self) -> int:
        """Number of recorded durations."""
        return sum(self.counts)

    def since(self, earlier: HistogramSnapshot) -> HistogramSnapshot:
        """Return the durations that were added after an earlier snapshot of the histogram."""
        gained = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return replace(self, counts=gained, total_s=self.total_s - earlier.total_s)

    def in_bins(self, bounds_s: Sequence[float]) -> HistogramSnapshot:
        """Return the same durations in larger bins; the bounds are some of these bounds."""
        ends = [self.bounds_s.index(bound_s) + 1 for bound_s in bounds_s]
        firsts, lasts = [0, *ends], [*ends, None]
        counts = tuple(
            sum(self.counts[first:last]) for first, last in zip(firsts, lasts, strict=True)
        )
        return HistogramSnapshot(bounds_s=tuple(bounds_s), counts=counts, total_s=self.total_s)

    def quantile_s(self, part: float) -> float | None:
        """Return the duration that this part of all durations does not exceed; None without any.

        It is interpolated within a bin. Durations above every bound count as the last bound.
        """
        rank = part * self.num_durations
        num_below = 0
        low_s = 0.0
        for bound_s, count in zip(self.bounds_s, self.counts, strict=False):
            if count and num_below + count >= rank:
                return low_s + (bound_s - low_s) * (rank - num_below) / count
            num_below += count
            low_s = bound_s
        return low_s if self.num_durations else None


class DurationHistogram:
    """Counts durations in bins. Not thread-safe."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._total_s = 0.0

    def record(self, duration_s: float) -> None:
        """Add a duration."""
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self._total_s += duration_s

    def snapshot(self) -> HistogramSnapshot:
        """Return the durations so far, unchanged by later durations."""
        return HistogramSnapshot(
            bounds_s=self._bounds_s, counts=tuple(self._counts), total_s=self._total_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of a replica since it started, with its scheduler's gauges."""

    scheduler: SchedulerStats
    num_steps: int
    last_step_s: float
    """Time from when its plan was sent, or the previous step ended if later, to its output."""
    num_prompt_tokens: int
    num_generated_tokens: int
    block_bytes: int
    """Bytes of one KV block on all ranks together."""
    kernels: KernelReport
    num_groups: int = 1
    """Groups of layers, each of which has a block of the tokens of a block."""
    state_blocks: int = 0
    """Blocks of the recurrent state of a sequence; 0 if the model has none."""
    replacements: dict[str, int] = field(default_factory=dict)
    """How often ranks were replaced, by cause: `death` or `hang`."""
    num_hangs: dict[str, int] = field(default_factory=dict)
    """Hangs that were found, by the party without progress: `rank` or `steps`."""
    num_lethal_requests: int = 0
    """Requests that ended because ranks died whenever they ran."""
    num_unpinned_blocks: int = 0
    """Blocks of the CPU pools that cannot be pinned, of all ranks."""
    num_uncaptured_graphs: int = 0
    """CUDA graphs that could not be captured; steps of their sizes run without them."""
    step_times: HistogramSnapshot = field(default_factory=HistogramSnapshot)
