"""Bandwidth of the Triton paged decode kernel on a GPU.

    python -m bench.kernels --output bench/results/kernels.json

Each case is a CUDA graph of several launches; times are medians over replays, between CUDA events.
A launch reads many times the size of the L2 cache, with blocks in random order. Only bytes of keys
and values are counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from attention.gpu.decode_schedule import DecodeDivision, DecodeMemory, DecodeScheduler
from attention.gpu.shared_kernels import decode_division
from attention.kernels.triton.tuning import (
    AttentionOptions,
    PagedAttentionTuning,
    default_decode_tuning,
)
from attention.params import AttentionParams
from tests.attention.kernels.decode_launch import paged_decode

LAUNCHES = 10
REPLAYS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A batch of decodes."""

    batch_size: int = 64
    seq_len: int = 2048
    block_size: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def params(self) -> AttentionParams:
        """Return the parameters of a layer."""
        return AttentionParams(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.head_size**-0.5,
        )

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of keys and values that one launch reads, bfloat16."""
        return 4 * self.batch_size * self.seq_len * self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    workload: Workload
    tuning: PagedAttentionTuning
    division: DecodeDivision
    is_default: bool
    microseconds: float
    terabytes_per_second: float


Settings = tuple[PagedAttentionTuning, DecodeDivision]


def defaults(workload: Workload) -> Settings:
    """Return the settings that backends use."""
    params = workload.params
    tuning = default_decode_tuning(
        num_queries_per_kv=params.num_queries_per_kv,
        head_size=workload.head_size,
        dtype=torch.bfloat16,
    )
    device = torch.device("cuda")
    return tuning, decode_division(params, tuning, workload.block_size, device)


def sweep(default: Settings) -> list[Settings]:
    """Return the default settings and variations of them."""
    settings = [default]
    tuning, division = default
    for tile_keys, num_warps, num_stages, percent in itertools.product(
        (32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (33, 66, 100, 133, 200)
    ):
        if 16 <= tile_keys // num_warps <= 32 and tile_keys * num_stages <= 384:
            other = replace(tuning, tile_keys=tile_keys, num_warps=num_warps, num_stages=num_stages)
            num_slots = max(1, division.costs.num_slots * percent // 100)
            costs = replace(division.costs, num_slots=num_slots)
            settings.append((other, replace(division, tile_keys=tile_keys, costs=costs)))
    return list(dict.fromkeys(settings))


class Decodes:
    """The tensors of one workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        num_blocks = -(-workload.seq_len // workload.block_size)
        count = workload.batch_size * num_blocks
        rows = workload.block_size, workload.num_kv_heads, workload.head_size
        heads = workload.batch_size, workload.num_heads, workload.head_size
        self._cache = torch.randn(count, 2, *rows, dtype=torch.bfloat16, device="cuda")
        self._query = torch.randn(*heads, dtype=torch.bfloat16, device="cuda")
        self._out = torch.empty_like(self._query)
        self._tables = torch.randperm(count).to(torch.int32).view(workload.batch_size, num_blocks)
        self._seq_lens = torch.full((workload.batch_size,), workload.seq_len, dtype=torch.int32)

    def set_lengths(self, seq_lens: list[int]) -> None:
        """Set the number of keys of each sequence, at most `seq_len` of the workload."""
        self._seq_lens = torch.tensor(seq_lens, dtype=torch.int32)

    def share(self, num_sequences: int, num_keys: int) -> None:
        """Let each group of adjacent sequences begin with the same whole blocks."""
        first = torch.arange(len(self._tables)) // num_sequences * num_sequences
        num_blocks = num_keys // self._workload.block_size
        self._tables[:, :num_blocks] = self._tables[first, :num_blocks]

    def microseconds(self, settings: Settings) -> float:
        """Return the median time of one launch."""
        workload = self._workload
        tuning, division = settings
        device = self._query.device
        scheduler = DecodeScheduler(
            division, workload.params, DecodeMemory(device), device, is_graph=True
        )
        items = scheduler.items_of(self._seq_lens.numpy(), self._tables.numpy())
        tables = self._tables.to(device)

        def launch() -> None:
            paged_decode(
                self._query,
                self._cache,
                block_tables=tables,
                items=items,
                options=AttentionOptions(scale=workload.head_size**-0.5, window_right=0),
                tuning=tuning,
                out=self._out,
            )

        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                launch()
        times: list[float] = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * start.elapsed_time(end) / LAUNCHES)
        return statistics.median(times)


def measure(workload: Workload) -> list[Row]:
    """Return a row for each tuning that fits the GPU, the fastest first."""
    decodes = Decodes(workload)
    default = defaults(workload)
    rows = []
    for settings in sweep(default):
        try:
            time_us = decodes.microseconds(settings)
        except triton.runtime.errors.OutOfResources:
            continue
        row = Row(
            workload=workload,
            tuning=settings[0],
            division=settings[1],
            is_default=settings == default,
            microseconds=time_us,
            terabytes_per_second=workload.cache_bytes / time_us / 1e6,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: row.microseconds)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--print", type=int, default=12, help="fastest tunings to print")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for block_size in arguments.block_sizes:
        workload = Workload(
            block_size=block_size, batch_size=arguments.batch_size, seq_len=arguments.seq_len
        )
        measured = measure(workload)
        rows.extend(measured)
        for place, row in enumerate(measured):
            if place < arguments.print or row.is_default:
                tuning = row.tuning
                print(
                    f"block {block_size:3}  keys {tuning.tile_keys:3}  warps {tuning.num_warps}  "
                    f"stages {tuning.num_stages}  slots {row.division.costs.num_slots}  "
                    f"{row.microseconds:7.1f} us  {row.terabytes_per_second:.2f} TB/s"
                    f"{'  default' if row.is_default else ''}",
                    flush=True,
                )
    if arguments.output:
        result = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rows": [asdict(row) for row in rows],
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
