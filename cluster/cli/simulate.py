"""`pagedray simulate`: replicas under a load, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from cluster.cli.bench.client import METRICS, BenchRequest, DraftCounts, LoadResult, Timing
from cluster.cli.bench.summary import Summary, latency_table, summarize, total_table
from cluster.cli.flag import noted_flags
from cluster.cli.simulate_flags import COSTS, set_sizes
from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.speculation import Speculator
from cluster.simulation.fleet import Fleet
from cluster.simulation.step_cost import LLAMA_8B_H200, read_step_cost
from cluster.simulation.virtual_disk import VirtualDisk
from cluster.simulation.virtual_replica import VirtualDrafter, VirtualReplica
from cluster.simulation.workload import Workload, read_trace
from pagedray.config import SchedulerConfig, SpeculationConfig
from pagedray.errors import StartupError
from pagedray.layout import cache_layout

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from cluster.simulation.fleet import Sample
    from cluster.simulation.virtual_replica import VirtualCall
    from cluster.simulation.workload import Arrival

__all__ = ["simulate"]

_FAILURE_EXIT = 1
_WIDTH, _PANEL_HEIGHT = 800, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 30, 25
_COLORS = ("#1f6fb2", "#d1662a")

_PERCENTILES = (50.0, 90.0, 99.0)
_ACCEPTANCE = 0.7
"""How likely each draft is right if those before it are."""


def simulate(parsed: argparse.Namespace) -> int:
    """Run a simulation and print its figures; return 1 if a request was rejected.

    Raises PagedRayError.
    """
    arrivals = _arrivals(parsed)
    set_sizes(parsed)
    fleet = _fleet(parsed)
    fleet.run(arrivals)
    report = _make_report(fleet)
    if parsed.json:
        print(msgspec.json.encode(report.as_json(fleet)).decode())
    else:
        _print_tables(report)
    if parsed.plot is not None:
        _write_plot(parsed.plot, fleet)
    if not report.rejections:
        return 0
    print(
        f"pagedray: error: The fleet rejected {len(report.rejections)} of {len(arrivals)} "
        f"requests, the first one: {report.rejections[0]}",
        file=sys.stderr,
    )
    return _FAILURE_EXIT


def _fleet(parsed: argparse.Namespace) -> Fleet:
    windows = parsed.layer_windows or (None,)
    layout = cache_layout(windows, parsed.block_size)
    # A block of all layers has the memory of so many blocks of a group.
    num_parts = len(windows) / max(len(group.layers) for group in layout.groups)
    cost = LLAMA_8B_H200 if parsed.cost in COSTS else read_step_cost(Path(parsed.cost))
    cost = msgspec.structs.replace(
        cost, block_out_s=cost.block_out_s / num_parts, block_in_s=cost.block_in_s / num_parts
    )
    config = SchedulerConfig(
        max_num_seqs=parsed.max_num_seqs,
        max_num_batched_tokens=parsed.max_num_batched_tokens,
        max_queued_requests=parsed.max_queued_requests,
        max_queued_tokens=parsed.max_queued_tokens,
        preemption=parsed.preemption,
        itl_target_ms=parsed.itl_target_ms,
    )
    kv = KvOptions(
        block_size=parsed.block_size,
        num_blocks=int(parsed.num_blocks * num_parts),
        num_cpu_blocks=int(parsed.num_cpu_blocks * num_parts),
        num_disk_blocks=int(parsed.num_disk_blocks * num_parts),
        windows=layout.windows,
        enable_prefix_cache=not parsed.no_prefix_cache,
        enable_cpu_prefix_cache=not parsed.no_cpu_prefix_cache,
    )
    return Fleet(
        lambda: VirtualReplica(
            config,
            kv,
            cost,
            max_model_len=parsed.max_model_len,
            disk=VirtualDisk(
                read_s=parsed.disk_read_us / 1e6 / num_parts,
                write_s=parsed.disk_write_us / 1e6 / num_parts,
            ),
            speculator=_speculator(parsed),
        ),
        num_replicas=parsed.num_replicas,
    )


def _speculator(parsed: argparse.Namespace) -> Speculator | None:
    acceptance = parsed.draft_acceptance
    if not parsed.num_speculative_tokens:
        if acceptance is not None:
            raise StartupError("--draft-acceptance requires --num-speculative-tokens.")
        return None
    return Speculator(
        SpeculationConfig(num_speculative_tokens=parsed.num_speculative_tokens),
        VirtualDrafter(acceptance=_ACCEPTANCE if acceptance is None else acceptance),
    )


def _arrivals(parsed: argparse.Namespace) -> Sequence[Arrival]:
    if parsed.trace is not None:
        for flag in noted_flags(parsed):
            raise StartupError(f"{flag} cannot be used with --trace, which has the requests.")
        return read_trace(parsed.trace)
    if "--num-prefixes" in noted_flags(parsed) and not parsed.random_prefix_len:
        raise StartupError("--num-prefixes requires --random-prefix-len.")
    workload = Workload(
        num_requests=parsed.num_prompts,
        request_rate=parsed.request_rate,
        input_len=parsed.random_input_len,
        output_len=parsed.random_output_len,
        range_ratio=parsed.random_range_ratio,
        prefix_len=parsed.random_prefix_len,
        num_prefixes=parsed.num_prefixes,
        num_tenants=parsed.num_tenants,
        seed=parsed.seed,
    )
    try:
        return workload.arrivals()
    except ValueError as error:
        raise StartupError(f"The flags describe invalid requests: {error}.") from error


def _print_tables(report: Report) -> None:
    console = Console()
    totals = total_table(report.summary, {})
    totals.add_row("Preemptions by swapping", str(report.num_swap_preemptions))
    totals.add_row("Preemptions by recomputing", str(report.num_recompute_preemptions))
    totals.add_row("Prefix cache hits", f"{report.hit_rate:.1%}")
    totals.add_row("  in the CPU pool", f"{report.cpu_hit_rate:.1%}")
    totals.add_row("    read from the disk", f"{report.disk_hit_rate:.1%}")
    totals.add_row("Peak blocks in use", f"{report.peak_kv_use:.1%}")
    console.print(totals)
    console.print(latency_table(report.summary, tuple(METRICS), _PERCENTILES))


def _write_plot(path: Path, fleet: Fleet) -> None:
    try:
        path.write_text(draw_samples(fleet.samples))
    except OSError as error:
        raise StartupError(f"Cannot write --plot to {path}: {error.strerror}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    title: str
    lines: Sequence[tuple[str, Sequence[float]]]
    """The name and the values of each line."""


def draw_samples(samples: Sequence[Sample]) -> str:
    """Return an SVG document with one panel above another."""
    times = [one.time_s for one in samples]
    panels = (
        _Panel(
            title="sequences",
            lines=(
                ("running", [one.num_running for one in samples]),
                ("waiting", [one.num_waiting for one in samples]),
            ),
        ),
        _Panel(
            title="blocks in use, percent",
            lines=(("blocks", [100.0 * one.kv_use for one in samples]),),
        ),
        _Panel(
            title="generated tokens per second",
            lines=(("tokens", _rates(times, [one.num_generated_tokens for one in samples])),),
        ),
        _Panel(
            title="preemptions since the start",
            lines=(("preemptions", [one.num_preemptions for one in samples]),),
        ),
    )
    height = len(panels) * _PANEL_HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _draw_panel(panel, times, top=number * _PANEL_HEIGHT)
    parts.append(f'<text x="{_WIDTH / 2}" y="{height - 6}" text-anchor="middle">seconds</text>')
    return "\n".join((*parts, "</svg>", ""))


def _draw_panel(panel: _Panel, times: Sequence[float], *, top: int) -> Iterator[str]:
    left, right = _LEFT, _WIDTH - _RIGHT
    high, low = top + _TOP, top + _PANEL_HEIGHT - _BOTTOM
    most = max((value for _, values in panel.lines for value in values), default=0.0) or 1.0
    last_s = max(times, default=0.0) or 1.0
    yield f'<text x="{left}" y="{high - 10}" font-weight="bold">{panel.title}</text>'
    for part in (0.0, 0.5, 1.0):
        y = low - part * (low - high)
        x = left + part * (right - left)
        yield f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#dddddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{part * most:,.4g}</text>'
        yield f'<text x="{x}" y="{low + 16}" text-anchor="middle">{part * last_s:,.4g}</text>'
    for number, (name, values) in enumerate(panel.lines):
        color = _COLORS[number]
        points = " ".join(
            f"{left + time_s / last_s * (right - left):.1f},{low - value / most * (low - high):.1f}"
            for time_s, value in zip(times, values, strict=True)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        if len(panel.lines) > 1:
            x = right - 80 * (len(panel.lines) - number - 1)
            yield f'<text x="{x}" y="{high - 10}" text-anchor="end" fill="{color}">{name}</text>'


def _rates(times: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return by how much a count grows per second, from the sample before."""
    pairs = pairwise([(0.0, 0), *zip(times, counts, strict=True)])
    return [
        (later - earlier) / max(later_s - earlier_s, 1e-9)
        for (earlier_s, earlier), (later_s, later) in pairs
    ]


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


def _make_report(fleet: Fleet) -> Report:
    """Return the figures of a fleet that has run."""
    stats = [one.scheduler.stats() for one in fleet.replicas]
    num_queried = sum(one.num_queried_tokens for one in stats)
    drafts = DraftCounts(
        sum(one.speculation.num_chains for one in stats),
        sum(one.speculation.num_draft_tokens for one in stats),
        sum(one.speculation.num_accepted_tokens for one in stats),
    )
    return Report(
        summary=summarize(_load_of(fleet.calls, drafts), percentiles=_PERCENTILES, limits_ms={}),
        rejections=tuple(call.error for call in fleet.calls if call.error),
        num_swap_preemptions=sum(one.num_swap_preemptions for one in stats),
        num_recompute_preemptions=sum(one.num_recompute_preemptions for one in stats),
        hit_rate=sum(one.num_hit_tokens for one in stats) / max(num_queried, 1),
        cpu_hit_rate=sum(one.num_cpu_hit_tokens for one in stats) / max(num_queried, 1),
        disk_hit_rate=sum(one.num_disk_hit_tokens for one in stats) / max(num_queried, 1),
        peak_kv_use=max((sample.kv_use for sample in fleet.samples), default=0.0),
    )


def _load_of(calls: Sequence[VirtualCall], drafts: DraftCounts) -> LoadResult:
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
        drafts=drafts,
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
