"""The figures of a simulation, with the names of a load test."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cluster.cli.bench.client import BenchRequest, Timing
from cluster.cli.bench.load import LoadResult
from cluster.cli.bench.summary import Summary, summarize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.simulation.fleet import Fleet
    from cluster.simulation.virtual_replica import VirtualCall

__all__ = ["PERCENTILES", "Report", "make_report"]

PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a simulation."""

    summary: Summary
    rejections: tuple[str, ...]
    """The reasons why requests were rejected, a reason for each request."""
    num_swap_preemptions: int
    num_recompute_preemptions: int
    hit_rate: float
    """The part of the prompt tokens that the prefix cache had."""
    cpu_hit_rate: float
    """The part of them that it had in the CPU pool."""
    disk_hit_rate: float
    """The part of them that was read from the disk into the CPU pool."""
    peak_kv_use: float

    def as_json(self, fleet: Fleet) -> dict[str, object]:
        """Return the object that `--json` prints."""
        report = self.summary.as_json()
        # There is no client.
        del report["client_cpu_share"]
        return report | {
            "swap_preemptions": self.num_swap_preemptions,
            "recompute_preemptions": self.num_recompute_preemptions,
            "prefix_cache_hit_rate": self.hit_rate,
            "cpu_prefix_cache_hit_rate": self.cpu_hit_rate,
            "disk_prefix_cache_hit_rate": self.disk_hit_rate,
            "peak_kv_use": self.peak_kv_use,
            "samples": [asdict(sample) for sample in fleet.samples],
        }


def make_report(fleet: Fleet) -> Report:
    """Return the figures of a fleet that has run."""
    stats = [one.scheduler.stats() for one in fleet.replicas]
    num_queried = sum(one.num_queried_tokens for one in stats)
    return Report(
        summary=summarize(_load_of(fleet.calls), percentiles=PERCENTILES, limits_ms={}),
        rejections=tuple(call.error for call in fleet.calls if call.error),
        num_swap_preemptions=sum(one.num_swap_preemptions for one in stats),
        num_recompute_preemptions=sum(one.num_recompute_preemptions for one in stats),
        hit_rate=sum(one.num_hit_tokens for one in stats) / max(num_queried, 1),
        cpu_hit_rate=sum(one.num_cpu_hit_tokens for one in stats) / max(num_queried, 1),
        disk_hit_rate=sum(one.num_disk_hit_tokens for one in stats) / max(num_queried, 1),
        peak_kv_use=max((sample.kv_use for sample in fleet.samples), default=0.0),
    )


def _load_of(calls: Sequence[VirtualCall]) -> LoadResult:
    """Return the load as a client would have seen it."""
    timings, requests = [], []
    for call in calls:
        if call.end_s is None:
            continue
        timings.append(
            Timing(
                started_s=call.arrival_s,
                arrivals_s=tuple(call.token_times_s),
                ended_s=call.end_s,
                num_prompt_tokens=call.num_prompt_tokens,
                num_generated_tokens=call.num_tokens,
            )
        )
        requests.append(
            BenchRequest(
                prompt="",
                num_prompt_tokens=call.num_prompt_tokens,
                max_tokens=call.num_output_tokens,
            )
        )
    ends_s = [timing.ended_s for timing in timings]
    first_s = min((timing.started_s for timing in timings), default=0.0)
    return LoadResult(
        timings=tuple(timings),
        requests=tuple(requests),
        failures=tuple(call.error for call in calls if call.error),
        duration_s=max(ends_s, default=0.0) - first_s,
        peak_concurrency=_peak_concurrency(timings),
        client_cpu_s=0.0,
    )


def _peak_concurrency(timings: Sequence[Timing]) -> int:
    # A call that ends when another begins is not open at the same time.
    changes = sorted(
        change for one in timings for change in ((one.started_s, 1), (one.ended_s, -1))
    )
    peak = current = 0
    for _, change in changes:
        current += change
        peak = max(peak, current)
    return peak
