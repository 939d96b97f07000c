"""Reduces the measurement of a case to its account: rows of kernels, gaps and the host's times."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedray.rank_roofline import RankRoofline

READ_BYTES_PER_S = 4.19e12
FLOP_PER_S = 792e12
MARKER = "spin_kernel"
GEMM = re.compile(r"nvjet|gemm|gemv|cutlass|xmma", re.IGNORECASE)
_OTHER_LAYERS = ("linear_num_key_heads", "conv_L_cache", "mamba_num_heads")
"""Fields of shapes with recurrent layers."""
NOT_GEMM = re.compile(r"reduce|flash|attention|prefill|decode", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, copy or fill on the device, in nanoseconds."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product of rows in 16 bits with a weight."""

    label: str
    num_rows: int
    size_in: int
    size_out: int

    @property
    def num_bytes(self) -> int:
        """The bytes of both operands and of the result."""
        return 2 * (self.size_in * self.size_out + self.num_rows * (self.size_in + self.size_out))

    @property
    def flop(self) -> int:
        """Number of operations."""
        return 2 * self.num_rows * self.size_in * self.size_out

    @property
    def floor_us(self) -> float:
        """The larger of the times that the bytes and the operations take."""
        return max(self.num_bytes / READ_BYTES_PER_S, self.flop / FLOP_PER_S) * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured while a batch of equal prompts decoded."""

    batch_size: int
    wall_us: float
    """Between steps without the profiler, median."""
    wall_context: int
    """Tokens of each row in the middle of these steps."""
    mean_context: float
    """The same in the steps with the profiler."""
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
    """From its start, or from the end of earlier kernels if that is later, to its end."""
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
    roof_us: float
    """The least time of a step, by the weights, states, keys and values that the step moves."""
    share_of_roof: float
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
    roofline: RankRoofline,
    *,
    backend: str,
) -> Account:
    """Return the account of a case from its measurement, for a model of this shape."""
    gemms = gemm_shapes(shape, measured.batch_size)
    steps = split_steps(measured.launches)
    span = sum(step[-1].start - step[0].start for step in steps)
    marker = sum(step[0].end - step[0].start for step in steps)
    gaps, gap = gaps_of(steps)
    roof_us = step_roof_us(roofline, measured.batch_size, measured.wall_context)
    count = max(len(steps), 1)
    return Account(
        case=name,
        backend=backend,
        num_profiled_steps=len(steps),
        wall_us=round(measured.wall_us, 1),
        roof_us=round(roof_us, 1),
        share_of_roof=round(roof_us / measured.wall_us, 3),
        tokens_per_s=round(measured.batch_size / measured.wall_us * 1e6, 1),
        span_us=round(span / count / 1e3, 1) if steps else None,
        busy_us=round((span - gap - marker) / count / 1e3, 1) if steps else None,
        marker_us=round(marker / count / 1e3, 1) if steps else None,
        gap_us=round(gap / count / 1e3, 1) if steps else None,
        mean_context=measured.mean_context,
        host_us=measured.host_us,
        clocks=measured.clocks,
        kernels=kernel_rows(steps, gemms),
        gaps=gaps,
    )


def split_steps(launches: list[Launch]) -> list[list[Launch]]:
    """Return the launches of each whole step, from its marker to the next one, inclusive."""
    marks = [i for i, one in enumerate(launches) if MARKER in one.name]
    return [launches[a : b + 1] for a, b in pairwise(marks)]


def step_roof_us(roofline: RankRoofline, num_rows: int, context: int) -> float:
    """Return the time to read weights, or to multiply by them if longer, then the memory of rows.

    A row reads its keys and values, and reads and writes its states.
    """
    dense, sampled, experts = roofline.weights, roofline.sampled, roofline.experts
    part = 0.0 if experts is None else experts.expected_part(num_rows)
    num_bytes = float(dense.num_bytes + sampled.num_bytes)
    num_bytes += part * (dense.expert_bytes + sampled.expert_bytes)
    flop = num_rows * (dense.row_flop + sampled.row_flop)
    cached = sum(
        one.token_bytes * min(context, one.window or context) for one in roofline.attention
    )
    row_bytes = cached + 2 * roofline.state_bytes
    weights_s = max(num_bytes / READ_BYTES_PER_S, flop / FLOP_PER_S)
    return (weights_s + num_rows * row_bytes / READ_BYTES_PER_S) * 1e6


def gemm_shapes(
    shape: dict[str, Any],  # Any: JSON values
    num_rows: int,
) -> list[Gemm]:
    """Return the GEMMs of a step of attention and MLPs, in their order; none of other layers."""
    if any(key in shape for key in _OTHER_LAYERS):
        return []
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    num_layers = shape["num_hidden_layers"]
    gemms = []
    for kind in shape.get("layer_types") or ["full_attention"] * num_layers:
        head_size, num_kv_heads = shape["head_dim"], shape["num_key_value_heads"]
        if kind == "full_attention" and "global_head_dim" in shape:
            head_size = shape["global_head_dim"]
            num_kv_heads = shape["num_global_key_value_heads"] or num_kv_heads
        query = shape["num_attention_heads"] * head_size
        qkv = query + 2 * num_kv_heads * head_size
        gemms += [
            Gemm("qkv", num_rows, hidden, qkv),
            Gemm("o", num_rows, query, hidden),
            Gemm("gate_up", num_rows, hidden, 2 * inner),
            Gemm("down", num_rows, inner, hidden),
        ]
    return [*gemms, Gemm("head", num_rows, hidden, shape["vocab_size"])]


def kernel_rows(steps: list[list[Launch]], gemms: list[Gemm]) -> list[KernelRow]:
    """Return a row for each kernel, those of the largest share first."""
    times: dict[tuple[str, str], int] = Counter()
    counts: dict[tuple[str, str], int] = Counter()
    multiplied: dict[tuple[str, str], list[Gemm]] = defaultdict(list)
    for step in steps:
        inside = step[1:-1]
        is_known = sum(_is_gemm(one.name) for one in inside) == len(gemms)
        labeled = iter(gemms)
        end = 0
        for one in inside:
            gemm = next(labeled) if is_known and _is_gemm(one.name) else None
            key = "" if gemm is None else gemm.label, one.name
            # A kernel that starts before the last one ends waits for its end.
            times[key] += max(one.end - max(one.start, end), 0)
            end = max(end, one.end)
            counts[key] += 1
            if gemm is not None:
                multiplied[key].append(gemm)
    rows = []
    for (label, name), time_ns in times.items():
        count = counts[label, name]
        us_each = time_ns / count / 1e3
        row: dict[str, Any] = {}  # Any: fields of a row
        if label:
            of_kernel = multiplied[label, name]
            num_bytes = sum(gemm.num_bytes for gemm in of_kernel)
            flop = sum(gemm.flop for gemm in of_kernel)
            floor_us = sum(gemm.floor_us for gemm in of_kernel)
            row["gigabytes"] = round(num_bytes / len(steps) / 1e9, 4)
            row["gigaflop"] = round(flop / len(steps) / 1e9, 2)
            row["share_of_roofline"] = round(floor_us / us_each / count, 3)
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
        f"{account.tokens_per_s:,.0f} tokens/s, mean context {account.mean_context:.0f}; roof "
        f"{account.roof_us:,.0f} us, {account.share_of_roof:.3f} of it"
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
