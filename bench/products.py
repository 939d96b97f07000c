"""What the matrix products of a layer take on a GPU, at which clock and power.

    python -m bench.products --output bench/results/products.json

The products of Llama 3 8B in bfloat16, as torch multiplies them (cuBLAS). Each is measured in a
CUDA graph that multiplies by one weight after another, so that none of them is in the L2 cache, for
about a second: a GPU takes a few milliseconds to lower its clock at its power limit. Times, clocks
and power are medians of the second half. Multiplying zeros takes little power, so that the column
of zeros shows what the same kernels would take at the highest clock. `bench.product_bounds` says
what follows for whole workloads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.engine import write_results

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Outputs and inputs of each weight of a layer."""
_DIVIDED_INPUTS = ("o", "down")
_MIN_WEIGHT_BYTES = 1 << 30
"""Many times the L2 cache."""
_MIN_NUM_WEIGHTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    product: str
    num_rows: int
    out_size: int
    in_size: int
    data: str
    microseconds: float
    tera_flop_per_s: float
    sm_mhz: float
    watts: float


def main() -> int:
    """Measure, print, and write if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-rows", type=int, nargs="+", default=[64, 256, 512, 1024, 8192])
    parser.add_argument("--num-ranks", type=int, default=1, help="among which weights are divided")
    parser.add_argument("--seconds", type=float, default=0.8, help="of each measurement")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for num_rows in options.num_rows:
        for data in ("random", "zeros"):
            layer = [
                measure(name, num_rows, options.num_ranks, data, options.seconds)
                for name in PRODUCTS
            ]
            rows += layer
            for row in layer:
                print(
                    f"{num_rows:5} rows  {row.product:8} {data:7} {row.microseconds:8.1f} us "
                    f"{row.tera_flop_per_s:6.0f} TFLOP/s {row.sm_mhz:6.0f} MHz {row.watts:5.0f} W"
                )
            total_us = sum(row.microseconds for row in layer)
            print(f"{num_rows:5} rows  a layer  {data:7} {total_us:8.1f} us", flush=True)
            if options.output is not None:
                write_results(options.output, "llama-8b", rows=rows)
    return 0


def measure(name: str, num_rows: int, num_ranks: int, data: str, seconds: float) -> Row:
    """Return what a product takes once clock and power are steady."""
    out_size, in_size = PRODUCTS[name]
    if name in _DIVIDED_INPUTS:
        in_size //= num_ranks
    else:
        out_size //= num_ranks
    num_weights = max(_MIN_NUM_WEIGHTS, -(-_MIN_WEIGHT_BYTES // (2 * out_size * in_size)))
    scale = 1.0 if data == "random" else 0.0
    x = _filled((num_rows, in_size), scale)
    weights = [_filled((out_size, in_size), scale * in_size**-0.5) for _ in range(num_weights)]
    graph = _captured(x, weights)
    times_us: list[float] = []
    clocks: list[int] = []
    powers: list[int] = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    deadline_s = time.perf_counter() + seconds
    while time.perf_counter() < deadline_s:
        start.record()
        graph.replay()
        end.record()
        # The next one follows at once, so that the device computes while it is asked.
        graph.replay()
        clocks.append(torch.cuda.clock_rate())
        powers.append(torch.cuda.power_draw())
        end.synchronize()
        times_us.append(1e3 * start.elapsed_time(end) / num_weights)
    torch.cuda.synchronize()
    steady = slice(len(times_us) // 2, None)
    microseconds = statistics.median(times_us[steady])
    return Row(
        product=name,
        num_rows=num_rows,
        out_size=out_size,
        in_size=in_size,
        data=data,
        microseconds=round(microseconds, 2),
        tera_flop_per_s=round(2e-6 * num_rows * out_size * in_size / microseconds, 1),
        sm_mhz=statistics.median(clocks[steady]),
        watts=statistics.median(powers[steady]) / 1000,
    )


def _filled(shape: tuple[int, int], scale: float) -> torch.Tensor:
    """Return normal numbers of this standard deviation, bfloat16, on the device."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(scale)


def _captured(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """Return a graph that multiplies `x` by one weight after another."""
    out = torch.empty(len(x), len(weights[0]), dtype=x.dtype, device=x.device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mm(x, weights[0].t(), out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for weight in weights:
                torch.mm(x, weight.t(), out=out)
    return graph


if __name__ == "__main__":
    sys.exit(main())
