"""The table that a load test prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from cluster.cli.bench.latencies import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cluster.cli.bench.summary import Summary

__all__ = ["latency_table", "total_table"]


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
