"""Figures of a load test, under the names that `vllm bench serve` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cluster.cli.bench.latencies import GOALS, METRICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.cli.bench.client import Timing
    from cluster.cli.bench.load import LoadResult

__all__ = ["Distribution", "Summary", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A latency in milliseconds; 0 without values."""

    mean: float
    std: float
    percentiles: Mapping[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a load test."""

    completed: int
    failed: int
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    peak_concurrency: int
    client_load: float
    """The part of a core that the client took."""
    latencies: Mapping[str, Distribution]
    goodput: float | None
    """Requests per second within every limit; None without limits."""

    def as_json(self) -> dict[str, object]:
        """Return the object that `--json` prints."""
        duration_s = max(self.duration_s, 1e-9)
        total = self.num_input_tokens + self.num_output_tokens
        report: dict[str, object] = {
            "completed": self.completed,
            "failed": self.failed,
            "duration": self.duration_s,
            "total_input_tokens": self.num_input_tokens,
            "total_output_tokens": self.num_output_tokens,
            "request_throughput": self.completed / duration_s,
            "output_throughput": self.num_output_tokens / duration_s,
            "total_token_throughput": total / duration_s,
            "max_concurrent_requests": self.peak_concurrency,
            "client_cpu_share": self.client_load,
        }
        if self.goodput is not None:
            report["request_goodput"] = self.goodput
        for name, found in self.latencies.items():
            report[f"mean_{name}_ms"] = found.mean
            report[f"std_{name}_ms"] = found.std
            for percentile, value in found.percentiles.items():
                report[f"p{percentile:g}_{name}_ms"] = value
                if percentile == 50:
                    report[f"median_{name}_ms"] = value
        return report


def summarize(
    result: LoadResult, *, percentiles: Sequence[float], limits_ms: Mapping[str, float]
) -> Summary:
    """Return the figures; good requests keep `limits_ms` for some of `GOALS`."""
    of_requests = [_latencies(timing) for timing in result.timings]
    good = [one for one in of_requests if all(one[goal] <= limits_ms[goal] for goal in limits_ms)]
    values = {name: [one[name] for one in of_requests if name in one] for name in GOALS}
    values["tpot"] = [
        one["tpot"]
        for one, timing in zip(of_requests, result.timings, strict=True)
        if timing.num_generated_tokens > 1
    ]
    values["itl"] = [gap for timing in result.timings for gap in _gaps(timing)]
    is_counted = all(timing.num_prompt_tokens for timing in result.timings)
    return Summary(
        completed=len(result.timings),
        failed=len(result.failures),
        duration_s=result.duration_s,
        num_input_tokens=sum(
            timing.num_prompt_tokens if is_counted else request.num_prompt_tokens
            for timing, request in zip(result.timings, result.requests, strict=True)
        ),
        num_output_tokens=sum(timing.num_generated_tokens for timing in result.timings),
        peak_concurrency=result.peak_concurrency,
        client_load=result.client_cpu_s / max(result.duration_s, 1e-9),
        latencies={name: _distribution(values[name], percentiles) for name in METRICS},
        goodput=len(good) / max(result.duration_s, 1e-9) if limits_ms else None,
    )


def _latencies(timing: Timing) -> dict[str, float]:
    """Return the latencies of `GOALS` in milliseconds."""
    first_s = timing.arrivals_s[0] if timing.arrivals_s else timing.ended_s
    last_s = timing.arrivals_s[-1] if timing.arrivals_s else timing.ended_s
    num_others = timing.num_generated_tokens - 1
    return {
        "ttft": (first_s - timing.started_s) * 1e3,
        "tpot": (last_s - first_s) * 1e3 / num_others if num_others > 0 else 0.0,
        "e2el": (timing.ended_s - timing.started_s) * 1e3,
    }


def _gaps(timing: Timing) -> list[float]:
    pairs = zip(timing.arrivals_s, timing.arrivals_s[1:], strict=False)
    return [(later - earlier) * 1e3 for earlier, later in pairs]


def _distribution(values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    found = np.asarray(values or [0.0])
    return Distribution(
        mean=float(found.mean()),
        std=float(found.std()),
        percentiles={one: float(np.percentile(found, one)) for one in percentiles},
    )
