"""`pagedray simulate`: replicas under a load, in virtual time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from cluster.cli.bench.latencies import METRICS
from cluster.cli.bench.table import latency_table, total_table
from cluster.cli.flags.noted_flag import noted_flags
from cluster.cli.simulate.flags import COSTS, set_sizes
from cluster.cli.simulate.plot import draw_samples
from cluster.cli.simulate.report import PERCENTILES, make_report
from cluster.scheduling.kv_manager import KvOptions
from cluster.simulation.fleet import Fleet
from cluster.simulation.step_cost import LLAMA_8B_H200, read_step_cost
from cluster.simulation.virtual_disk import VirtualDisk
from cluster.simulation.virtual_replica import VirtualReplica
from cluster.simulation.workload import Workload, read_trace
from pagedray.config import SchedulerConfig
from pagedray.errors import StartupError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from cluster.cli.simulate.report import Report
    from cluster.simulation.workload import Arrival

__all__ = ["simulate"]

_FAILURE_EXIT = 1


def simulate(parsed: argparse.Namespace) -> int:
    """Run a simulation and print its figures; return 1 if a request was rejected.

    Raises PagedRayError.
    """
    arrivals = _arrivals(parsed)
    set_sizes(parsed)
    fleet = _fleet(parsed)
    fleet.run(arrivals)
    report = make_report(fleet)
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
    cost = LLAMA_8B_H200 if parsed.cost in COSTS else read_step_cost(Path(parsed.cost))
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
        num_blocks=parsed.num_blocks,
        num_cpu_blocks=parsed.num_cpu_blocks,
        num_disk_blocks=parsed.num_disk_blocks,
        enable_prefix_cache=not parsed.no_prefix_cache,
        enable_cpu_prefix_cache=not parsed.no_cpu_prefix_cache,
    )
    return Fleet(
        lambda: VirtualReplica(
            config,
            kv,
            cost,
            max_model_len=parsed.max_model_len,
            disk=VirtualDisk(read_s=parsed.disk_read_us / 1e6, write_s=parsed.disk_write_us / 1e6),
        ),
        num_replicas=parsed.num_replicas,
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
    console.print(latency_table(report.summary, tuple(METRICS), PERCENTILES))


def _write_plot(path: Path, fleet: Fleet) -> None:
    try:
        path.write_text(draw_samples(fleet.samples))
    except OSError as error:
        raise StartupError(f"Cannot write --plot to {path}: {error.strerror}.") from error
