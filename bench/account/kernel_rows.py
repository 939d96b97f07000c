"""Reduces the measurement of a case to its account: rows of kernels, gaps and the host's times."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

READ_BYTES_PER_S = 4.19e12
FLOP_PER_S = 792e12
MARKER = "spin_kernel"
GEMM = re.compile(r"nvjet|gemm|gemv|cutlass|xmma", re.IGNORECASE)
NOT_GEMM = re.compile(r"reduce|flash|attention|prefill|decode", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, copy or fill on the device, in nanoseconds."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured while a batch of equal prompts decoded."""

    batch_size: int
    wall_us: float
    """Between steps without the profiler, median."""
    mean_context: float
    host_us: dict[str, tuple[float, float]]
    """Median and 99th percentile of each part of the rank's launch."""
    clocks: str
    launches: list[Launch]
    """In order, from before a step to after one; none without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel of a step."""

    name: str
    launches: float
    """A step, as are all other figures but `us_each`."""
    us_each: float
    us: float
    gigabytes: float | None = None
    """By formula; None for kernels without one."""
    gigaflop: float | None = None
    share_of_roofline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account of one case; microseconds a step."""

    case: str
    backend: str
    num_profiled_steps: int
    wall_us: float
    """Between steps without the profiler, median."""
    tokens_per_s: float
    span_us: float | None
    """Between markers, mean; None without a GPU, as the next three."""
    busy_us: float | None
    marker_us: float | None
    gap_us: float | None
    mean_context: float
    host_us: dict[str, tuple[float, float]]
    """Median and 99th percentile of each part of the rank's launch."""
    clocks: str
    kernels: list[KernelRow]
    gaps: dict[str, float]


def account_of(
    name: str,
    measured: Measurement,
    shape: dict[str, Any],  # Any: JSON values
    *,
    backend: str,
) -> Account:
    """Return the account of a case from its measurement, for a model of this shape."""
    gemms = gemm_shapes(shape, measured.batch_size)
    steps = split_steps(measured.launches)
    span = sum(step[-1].start - step[0].start for step in steps)
    marker = sum(step[0].end - step[0].start for step in steps)
    gaps, gap = gaps_of(steps)
    count = max(len(steps), 1)
    return Account(
        case=name,
        backend=backend,
        num_profiled_steps=len(steps),
        wall_us=round(measured.wall_us, 1),
        tokens_per_s=round(measured.batch_size / measured.wall_us * 1e6, 1),
        span_us=round(span / count / 1e3, 1) if steps else None,
        busy_us=round((span - gap - marker) / count / 1e3, 1) if steps else None,
        marker_us=round(marker / count / 1e3, 1) if steps else None,
        gap_us=round(gap / count / 1e3, 1) if steps else None,
        mean_context=measured.mean_context,
        host_us=measured.host_us,
        clocks=measured.clocks,
        kernels=kernel_rows(steps, gemms, shape["num_hidden_layers"]),
        gaps=gaps,
    )


def split_steps(launches: list[Launch]) -> list[list[Launch]]:
    """Return the launches of each whole step, from its marker to the next one, inclusive."""
    marks = [i for i, one in enumerate(launches) if MARKER in one.name]
    return [launches[a : b + 1] for a, b in pairwise(marks)]


def gemm_shapes(
    shape: dict[str, Any],  # Any: JSON values
    num_rows: int,
) -> dict[str, tuple[int, int, int]]:
    """Return rows, columns in and columns out of each GEMM, in the order of a step."""
    hidden, head_size = shape["hidden_size"], shape["head_dim"]
    query = shape["num_attention_heads"] * head_size
    qkv = query + 2 * shape["num_key_value_heads"] * head_size
    return {
        "qkv": (num_rows, hidden, qkv),
        "o": (num_rows, query, hidden),
        "gate_up": (num_rows, hidden, 2 * shape["intermediate_size"]),
        "down": (num_rows, shape["intermediate_size"], hidden),
        "head": (num_rows, hidden, shape["vocab_size"]),
    }


def kernel_rows(
    steps: list[list[Launch]], gemms: dict[str, tuple[int, int, int]], num_layers: int
) -> list[KernelRow]:
    """Return a row for each kernel, those of the largest share first."""
    times: dict[tuple[str, str], int] = Counter()
    counts: dict[tuple[str, str], int] = Counter()
    layer_gemms = list(gemms)[:4]
    for step in steps:
        inside = step[1:-1]
        multiplied = [one for one in inside if _is_gemm(one.name)]
        labels = [*layer_gemms * num_layers, "head"]
        is_known = len(multiplied) == len(labels)
        labeled = iter(labels)
        for one in inside:
            label = next(labeled) if is_known and _is_gemm(one.name) else ""
            times[label, one.name] += one.end - one.start
            counts[label, one.name] += 1
    rows = []
    for (label, name), time_ns in times.items():
        count = counts[label, name]
        us_each = time_ns / count / 1e3
        row: dict[str, Any] = {}  # Any: fields of a row
        if label:
            rows_in, size_in, size_out = gemms[label]
            num_bytes = 2 * (size_in * size_out + rows_in * (size_in + size_out))
            flop = 2 * rows_in * size_in * size_out
            floor_us = max(num_bytes / READ_BYTES_PER_S, flop / FLOP_PER_S) * 1e6
            row["gigabytes"] = round(num_bytes * count / len(steps) / 1e9, 4)
            row["gigaflop"] = round(flop * count / len(steps) / 1e9, 2)
            row["share_of_roofline"] = round(floor_us / us_each, 3)
        rows.append(
            KernelRow(
                name=f"{label + ': ' if label else ''}{name}"[:150],
                launches=round(count / len(steps), 2),
                us_each=round(us_each, 2),
                us=round(time_ns / len(steps) / 1e3, 1),
                **row,
            )
        )
    return sorted(rows, key=lambda row: -row.us)


def gaps_of(steps: list[list[Launch]]) -> tuple[dict[str, float], int]:
    """Return the longest gaps by neighbors, microseconds a step, and the nanoseconds of all."""
    total: dict[str, int] = Counter()
    for step in steps:
        last, end = step[0], step[0].end
        for one in step[1:]:
            if one.start > end:
                total[f"{last.name[:50]} -> {one.name[:50]}"] += one.start - end
            if one.end > end:
                last, end = one, one.end
    longest = sorted(total.items(), key=lambda item: -item[1])[:15]
    return {name: round(gap / len(steps) / 1e3, 2) for name, gap in longest}, sum(total.values())


def print_account(account: Account) -> None:
    """Print a case as a table."""
    print(
        f"\n== {account.case} ({account.backend}): {account.wall_us:,.0f} us a step, "
        f"{account.tokens_per_s:,.0f} tokens/s, mean context {account.mean_context:.0f}"
    )
    for name, (median, late) in account.host_us.items():
        print(f"   host {name:14} p50 {median:9.1f} us  p99 {late:9.1f} us")
    if account.span_us is None:
        return
    print(
        f"   {account.num_profiled_steps} steps: span {account.span_us} us = busy "
        f"{account.busy_us} + gaps {account.gap_us} + marker {account.marker_us}; {account.clocks}"
    )
    for row in account.kernels:
        if row.us >= 1.0:
            roofline = "" if row.share_of_roofline is None else f"{row.share_of_roofline:6.3f}"
            gigabytes = "" if row.gigabytes is None else f"{row.gigabytes:8.3f} GB"
            print(
                f"   {row.launches:7.2f} x {row.us_each:9.2f} = {row.us:9.1f} us "
                f"{gigabytes:11} {roofline:6}  {row.name[:100]}"
            )
    print("   gaps:")
    for name, gap in account.gaps.items():
        print(f"   {gap:9.2f} us  {name}")
    sys.stdout.flush()


def _is_gemm(name: str) -> bool:
    return GEMM.search(name) is not None and NOT_GEMM.search(name) is None
