"""The load of a server in the last ten minutes, and the latencies of the last minute.

A sample is taken every five seconds and costs a few microseconds. Samples are kept nowhere else;
Prometheus has the long history.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.engine.stats import DurationHistogram, HistogramSnapshot
from pagedray.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.engine.stats import EngineStats

__all__ = ["LATENCY_BOUNDS_S", "Latency", "LoadHistory", "LoadRecorder", "LoadSample"]

_INTERVAL_S = 5.0
_NUM_SAMPLES = 120
_NUM_RECENT = 12
LATENCY_BOUNDS_S = tuple(0.0001 * 2 ** (number / 8) for number in range(8 * 24 + 1))
"""Bounds from 0.1 ms to about half an hour, each 9 % higher than the bound before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """What a server did in one interval; times are None if no call had any."""

    uptime_s: float
    """The end of the interval, in seconds since the server started."""
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    num_running: int
    num_waiting: int
    num_used_blocks: int
    first_token_p50_s: float | None
    """The median time from the arrival of a call to its first token."""
    first_token_p95_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Quantiles of a duration, None if there was none."""

    num_durations: int = 0
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHistory:
    """What a server did in the last ten minutes."""

    interval_s: float
    """Seconds between two samples."""
    num_blocks: int
    samples: tuple[LoadSample, ...]
    """Samples, the oldest first."""
    first_token: Latency
    """Time from the arrival of a call to its first token, in the last minute."""
    between_tokens: Latency
    """Time between two outputs of a call, in the last minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    uptime_s: float
    num_prompt_tokens: int
    num_generated_tokens: int
    first_token: HistogramSnapshot
    between_tokens: HistogramSnapshot


class LoadRecorder:
    """Records durations of calls, and samples the engine. Used from the event loop only."""

    def __init__(self, between_tokens: DurationHistogram) -> None:
        """`between_tokens` has the times between two outputs of all calls."""
        self.first_token = DurationHistogram(LATENCY_BOUNDS_S)
        self._between_tokens = between_tokens
        self._counts: deque[_Counts] = deque(maxlen=_NUM_RECENT + 1)
        self._samples: deque[LoadSample] = deque(maxlen=_NUM_SAMPLES)
        self._num_blocks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start_sampling(
        self, stats: Callable[[], EngineStats], uptime_s: Callable[[], float]
    ) -> None:
        """Take a sample at once and every five seconds on the running event loop."""
        # Before the engine is attached, and after it has failed, there are no statistics.
        with contextlib.suppress(EngineError):
            self.add_sample(stats(), uptime_s())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_INTERVAL_S, self.start_sampling, stats, uptime_s)

    def stop_sampling(self) -> None:
        """Take no more samples. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def add_sample(self, stats: EngineStats, uptime_s: float) -> None:
        """Record the load since the last sample."""
        counts = _Counts(
            uptime_s=uptime_s,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_generated_tokens=stats.num_generated_tokens,
            first_token=self.first_token.snapshot(),
            between_tokens=self._between_tokens.snapshot(),
        )
        scheduler = stats.scheduler
        self._num_blocks = scheduler.num_blocks
        before = self._counts[-1] if self._counts else None
        self._counts.append(counts)
        # The first sample is where the first interval begins.
        if before is None or uptime_s <= before.uptime_s:
            return
        passed_s = uptime_s - before.uptime_s
        first_token = counts.first_token.since(before.first_token)
        self._samples.append(
            LoadSample(
                uptime_s=round(uptime_s, 3),
                prompt_tokens_per_s=_rate(
                    counts.num_prompt_tokens - before.num_prompt_tokens, passed_s
                ),
                generated_tokens_per_s=_rate(
                    counts.num_generated_tokens - before.num_generated_tokens, passed_s
                ),
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_used_blocks=scheduler.num_blocks - scheduler.num_free_blocks,
                first_token_p50_s=_rounded(first_token.quantile_s(0.5)),
                first_token_p95_s=_rounded(first_token.quantile_s(0.95)),
            )
        )

    def history(self) -> LoadHistory:
        """Return the last ten minutes."""
        first_token = between_tokens = Latency()
        if self._counts:
            first, last = self._counts[0], self._counts[-1]
            first_token = _latency(last.first_token.since(first.first_token))
            between_tokens = _latency(last.between_tokens.since(first.between_tokens))
        return LoadHistory(
            interval_s=_INTERVAL_S,
            num_blocks=self._num_blocks,
            samples=tuple(self._samples),
            first_token=first_token,
            between_tokens=between_tokens,
        )


def _latency(durations: HistogramSnapshot) -> Latency:
    return Latency(
        num_durations=durations.num_durations,
        p50_s=_rounded(durations.quantile_s(0.5)),
        p90_s=_rounded(durations.quantile_s(0.9)),
        p99_s=_rounded(durations.quantile_s(0.99)),
    )


def _rate(num_tokens: int, passed_s: float) -> float:
    return round(max(0, num_tokens) / passed_s, 2)


def _rounded(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s, 6)
