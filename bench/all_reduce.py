"""The all-reduce of a layer's output, with the residual and norm after it: NCCL, and one kernel.

    python -m bench.all_reduce --num-ranks 2 --output bench/results/all_reduce.json

Each rank is a process with a GPU of its own. A CUDA graph runs 64 of them in a row, as a decode
step of 32 layers does; the figure is the median time of a replay over 64. NCCL's all-reduce is
followed by the kernel that adds and norms; the one-shot kernel does all of it. It is measured once
more with a rank that begins each replay late, on that rank: waits must not delay what is awaited.
The errors are those of sums of random rows against float64. With more than two ranks, the kernel
also takes more rows here than in an engine, to show from how many on NCCL is faster.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attention.kernels.triton.norm_rope import add_norm
from bench.engine import write_results
from workers.parallel import all_reduce
from workers.parallel.peer_memory import RowShape
from workers.parallel.process_group import make_group
from workers.parallel.rendezvous import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
NUM_IN_GRAPH = 64
NUM_REPLAYS = 30
EPS = 1e-5
ERROR_SEED = 7
LATE_S = 4e-3
"""How much later than the others rank 0 begins, in the measurement with a late rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Microseconds of one all-reduce, addition and norm."""

    num_ranks: int
    num_rows: int
    width: int
    nccl_us: float
    nccl_error: float
    """Relative to the sum in float64."""
    one_shot_us: float | None
    """None for more rows than the kernel takes."""
    one_shot_error: float | None
    uses_one_shot: bool
    """Whether an engine sums so many rows by the kernel."""
    late_us: float | None
    """The same on a rank for which the others have waited, once in each replay."""


def main() -> int:
    """Start a process for each rank; the first prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096, help="elements of a row (4096)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rows = _measured(options.rank, options.num_ranks, options.port, options.width)
        if options.rank == 0 and options.output:
            write_results(options.output, f"rows of {options.width} bfloat16", rows=rows)
        return 0
    with socket.create_server((LOOPBACK, 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bench.all_reduce", *sys.argv[1:], f"--port={port}"]
    processes = [
        subprocess.Popen(
            [*command, f"--rank={rank}"], env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)}
        )
        for rank in range(options.num_ranks)
    ]
    return max(process.wait() for process in processes)


def _measured(rank: int, size: int, port: int, width: int) -> list[Row]:
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    shape = RowShape(width, dtype)
    most_used = all_reduce.most_rows(shape, size)
    all_reduce.MAX_BYTES = all_reduce.MAX_BYTES_OF_TWO
    group = make_group(rank, size, device=device, rows=shape)
    group.join((LOOPBACK, port), host=LOOPBACK)
    one_shot, group.one_shot = group.one_shot, None
    if one_shot is None:
        sys.exit("The ranks cannot write to each other's memory.")
    weight = torch.ones(width, dtype=dtype, device=device)
    found = []
    for num_rows in NUM_ROWS:
        stream, delta = torch.zeros(2, num_rows, width, dtype=dtype, device=device)

        def nccl(stream: torch.Tensor, delta: torch.Tensor) -> None:
            add_norm(stream, group.all_reduce(delta), weight, None, EPS, is_centered=False)

        def one(stream: torch.Tensor, delta: torch.Tensor) -> None:
            one_shot.add_norm(stream, delta, weight, None, EPS, is_centered=False)

        nccl_us = _replay_us(partial(nccl, stream, delta), group.barrier)
        nccl_error = _error(group.all_reduce, delta, rank, size)
        one_shot_us = late_us = one_shot_error = None
        if one_shot.takes(delta):
            one_shot_error = _error(one_shot.reduce_rows, delta, rank, size)
            one_shot_us = _replay_us(partial(one, stream, delta), group.barrier)
            late_us = _replay_us(
                partial(one, stream, delta), group.barrier, 0.0 if rank else LATE_S
            )
        row = Row(
            num_ranks=size,
            num_rows=num_rows,
            width=width,
            nccl_us=round(nccl_us, 2),
            nccl_error=nccl_error,
            one_shot_us=None if one_shot_us is None else round(one_shot_us, 2),
            one_shot_error=one_shot_error,
            uses_one_shot=num_rows <= most_used,
            late_us=None if late_us is None else round(late_us, 2),
        )
        if rank == 0:
            kernel, late = (
                "-" if time_us is None else f"{time_us:.1f}" for time_us in (one_shot_us, late_us)
            )
            print(
                f"{num_rows:4} rows: NCCL {nccl_us:.1f} us, one-shot {kernel} us, late {late} us",
                flush=True,
            )
        found.append(row)
    group.barrier()
    group.close()
    return found


def _error(
    all_reduce_rows: Callable[[torch.Tensor], torch.Tensor],
    like: torch.Tensor,
    rank: int,
    size: int,
) -> float:
    """Return the relative error of a sum of random rows; all ranks can make the rows of all."""
    parts = []
    for index in range(size):
        generator = torch.Generator(like.device).manual_seed(ERROR_SEED + index)
        rows = torch.randn(like.shape, device=like.device, generator=generator)
        parts.append(rows.to(like.dtype))
    exact = sum(part.double() for part in parts)
    error = all_reduce_rows(parts[rank].clone()).double() - exact
    return float(f"{float(error.norm() / torch.as_tensor(exact).norm()):.2e}")


def _replay_us(run: Callable[[], None], barrier: Callable[[], None], late_s: float = 0.0) -> float:
    """Return the median time of one run in a graph of many, each of which begins late."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NUM_IN_GRAPH):
            run()
    times_us = []
    for _ in range(NUM_REPLAYS):
        barrier()
        time.sleep(late_s)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_us.append(begin.elapsed_time(end) * 1e3 / NUM_IN_GRAPH)
    del graph
    return float(statistics.median(times_us))


if __name__ == "__main__":
    sys.exit(main())
