"""The figures of a load test, and the tables that print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from cluster.cli.bench.client import GOALS, METRICS, DraftCounts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.cli.bench.client import LoadResult, Timing

__all__ = ["Summary", "latency_table", "summarize", "total_table"]


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
    drafts: DraftCounts

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
        report |= self.drafts.figures()
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
        drafts=result.drafts,
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


def total_table(summary: Summary, limits_ms: Mapping[str, float]) -> Table:
    """Return a table of counts and throughput."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, value in _totals(summary, limits_ms):
        table.add_row(name, value)
    return table


def latency_table(summary: Summary, names: Sequence[str], percentiles: Sequence[float]) -> Table:
    """Return the latencies of these names, in milliseconds."""
    table = Table()
    table.add_column("ms")
    for heading in ("mean", *(f"p{one:g}" for one in percentiles)):
        table.add_column(heading, justify="right")
    for name in names:
        found = summary.latencies[name]
        values = (found.mean, *(found.percentiles[one] for one in percentiles))
        table.add_row(f"{METRICS[name]} ({name})", *(f"{value:.2f}" for value in values))
    return table


def _totals(summary: Summary, limits_ms: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    duration_s = max(summary.duration_s, 1e-9)
    total = summary.num_input_tokens + summary.num_output_tokens
    yield "Requests completed", str(summary.completed)
    yield "Requests failed", str(summary.failed)
    yield "Duration (s)", f"{summary.duration_s:.2f}"
    yield "Peak requests in flight", str(summary.peak_concurrency)
    yield "Input tokens", str(summary.num_input_tokens)
    yield "Output tokens", str(summary.num_output_tokens)
    yield "Requests per second", f"{summary.completed / duration_s:.2f}"
    yield "Output tokens per second", f"{summary.num_output_tokens / duration_s:.2f}"
    yield "Tokens per second", f"{total / duration_s:.2f}"
    if summary.goodput is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in limits_ms.items())
        yield f"Goodput ({limits}) in requests per second", f"{summary.goodput:.2f}"
    yield from summary.drafts.rows().items()
