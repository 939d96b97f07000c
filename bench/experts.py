"""Microseconds of a layer's experts on a GPU, beside the time that reading their weights takes.

    python -m bench.experts --output bench/results/experts.json

A CUDA graph has several calls of `expert_sums`, with as many layers' weights as exceed the L2 cache
and other choices of experts in each call; times are the medians of replays, divided by the calls.
`read_us` is the bytes of the experts that were chosen at the bandwidth of a large copy, measured
in the same run. Choosing experts is not counted, putting pairs in their order is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attention.kernels.arguments import ExpertWeights
from attention.kernels.triton.experts import choose_experts, expert_sums
from bench.engine import write_results

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_CALLS = 8
NUM_LAYERS = 4
NUM_REPLAYS = 10
DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The experts of a model's layer."""

    num_experts: int
    num_chosen: int
    hidden_size: int
    inner_size: int


SHAPES = {
    "qwen3-30b-a3b": Shape(num_experts=128, num_chosen=8, hidden_size=2048, inner_size=768),
    "mixtral-8x7b": Shape(num_experts=8, num_chosen=2, hidden_size=4096, inner_size=14336),
    "olmoe-1b-7b": Shape(num_experts=64, num_chosen=8, hidden_size=2048, inner_size=1024),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of rows."""

    shape: str
    num_rows: int
    num_read_experts: int
    us: float
    read_us: float
    tflops: float


def main() -> int:
    """Measure every shape, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeatable (all)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 16, 64, 128, 256, 512, 2048, 8192]
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    bytes_per_us = _copied_bytes_per_us()
    print(f"copy: {bytes_per_us / 1e6:.2f} TB/s")
    rows = []
    for name in options.shape or SHAPES:
        layers = [_layer(SHAPES[name]) for _ in range(NUM_LAYERS)]
        for num_rows in options.rows:
            rows.append(_row(name, num_rows, layers, bytes_per_us))
            row = rows[-1]
            print(
                f"{name:14} {num_rows:5} rows {row.num_read_experts:4} experts "
                f"{row.us:9.1f} us, read {row.read_us:7.1f}, {row.tflops:6.1f} TFLOP/s",
                flush=True,
            )
        del layers
    if options.output is not None:
        write_results(options.output, "experts", rows=rows)
    return 0


def _row(name: str, num_rows: int, layers: list[ExpertWeights], bytes_per_us: float) -> Row:
    shape = SHAPES[name]
    inputs = []
    for _ in range(NUM_CALLS):
        x = torch.randn(num_rows, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        logits = torch.randn(num_rows, shape.num_experts, device=DEVICE)
        inputs.append((x, *choose_experts(logits, shape.num_chosen, is_renormalized=True)))

    def call(index: int) -> None:
        x, experts, weights = inputs[index]
        expert_sums(x, experts, weights, layers[index % NUM_LAYERS])

    us = _us(call)
    num_read = round(statistics.mean(len(experts.unique()) for _, experts, _ in inputs))
    numbers = 3 * shape.inner_size * shape.hidden_size
    return Row(
        shape=name,
        num_rows=num_rows,
        num_read_experts=num_read,
        us=round(us, 1),
        read_us=round(num_read * numbers * 2 / bytes_per_us, 1),
        tflops=round(2 * num_rows * shape.num_chosen * numbers / us / 1e6, 1),
    )


def _us(call: Callable[[int], None]) -> float:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(NUM_CALLS):
            call(index)
    return _replayed_us(graph) / NUM_CALLS


def _replayed_us(graph: torch.cuda.CUDAGraph) -> float:
    times: list[float] = []
    for _ in range(NUM_REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def _copied_bytes_per_us() -> float:
    """Return the bytes that a large copy reads and writes."""
    source = torch.empty(2**32, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    graph = torch.cuda.CUDAGraph()
    target.copy_(source)
    with torch.cuda.graph(graph):
        target.copy_(source)
    return 2 * source.numel() / _replayed_us(graph)


def _layer(shape: Shape) -> ExpertWeights:
    """Return random weights of all experts."""

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16).div_(size[-1] ** 0.5)

    return ExpertWeights(
        first_expert=0,
        gate_up=randn(shape.num_experts, 2 * shape.inner_size, shape.hidden_size),
        down=randn(shape.num_experts, shape.hidden_size, shape.inner_size),
    )


if __name__ == "__main__":
    sys.exit(main())
